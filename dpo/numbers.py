"""Numbers and durations as text, for the terminal, pages and sentences."""

from __future__ import annotations

import math

LONGEST_TEXT = 4000


def compact(value: float, digits: int = 3) -> str:
    """A number with few digits, without an exponent if large."""
    return f"{value:,.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"


def figure(value: float, digits: int = 3) -> str:
    """A number as in print: `compact` with a minus sign, or "unknown"."""
    if not math.isfinite(value):
        return "unknown"
    text = compact(value, digits)
    return text.replace("-", "\N{MINUS SIGN}") if "e" not in text else text


def signed(value: float, digits: int = 3) -> str:
    """A figure with its sign."""
    return f"+{figure(value, digits)}" if value >= 0 else figure(value, digits)


def percent(share: float) -> str:
    """A share in percent; 100 % and 0 % only if exact."""
    if not math.isfinite(share):
        return "unknown"
    digits = 1 if 0.99 < share < 1 or 0 < share < 0.01 else 0
    text = f"{100 * share:.{digits}f}"
    return ("0 %" if float(text) == 0 else f"{text} %").replace("-", "\N{MINUS SIGN}")


def count(n: float, one: str, many: str = "") -> str:
    """`1 update`, `2,048 updates`."""
    return f"{n:,.0f} {one if n == 1 else many or one + 's'}"


def large(n: float) -> str:
    """`845`, `12.3k`, `1.2M`, `3.4B`."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e4, "k")):
        if n >= size:
            return f"{n / (1e3 if letter == 'k' else size):.3g}{letter}"
    return f"{n:,.0f}"


def duration(seconds: float) -> str:
    """Seconds as text, such as `8.4 s` or `2 h 5 min`."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 59.95:
        return f"{figure(seconds)} s"
    whole = round(seconds) if seconds < 3600 else 60 * round(seconds / 60)
    units = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))  # seconds, and the unit below
    size, unit, lower_size, lower_unit = next(row for row in units if whole >= row[0])
    rest = whole % size // lower_size
    return f"{whole // size} {unit}" + (f" {rest} {lower_unit}" if rest else "")


def clock_time(seconds: float) -> str:
    """`0:12`, `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    whole, minutes = divmod(minutes, 60)
    return f"{whole}:{minutes:02}:{rest:02}" if whole else f"{minutes}:{rest:02}"


def hours(value: float) -> str:
    """Device hours, with two digits below ten."""
    if 0 <= value < 0.1:
        return f"{value:.2g}"
    return f"{value:,.2f}" if value < 10 else f"{value:,.0f}"


def shortened(text: str) -> str:
    """A text stripped and cut to a length for a page."""
    text = text.strip()
    if len(text) <= LONGEST_TEXT:
        return text
    return f"{text[:LONGEST_TEXT]} ... ({len(text) - LONGEST_TEXT:,} more characters)"
