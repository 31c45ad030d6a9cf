"""Numbers as text, for people."""

import math

MINUS = "\N{MINUS SIGN}"


def compact(value: float, digits: int = 3) -> str:
    """Write a number with `digits` significant digits; with more before the point, in full, as `12,345`."""
    if abs(value) >= 10**digits - 0.5:  # a number that is rounded up to 10**digits would get an exponent
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def figure(value: float, digits: int = 3) -> str:
    """Write a number as `compact` does, but with a true minus sign; "unknown" if it is not finite."""
    if not math.isfinite(value):
        return "unknown"
    text = compact(value, digits)
    return text if "e" in text else text.replace("-", MINUS)  # 1e-05 keeps its hyphen


def signed(value: float) -> str:
    """Write a number as `figure` does, with a plus sign if it is not negative."""
    return f"+{figure(value)}" if value >= 0 else figure(value)


def percent(share: float) -> str:
    """Write a share (1 is all) in percent, with one decimal near 0 and 1; "unknown" if it is not finite."""
    if not math.isfinite(share):
        return "unknown"
    has_decimal = 0.99 < share < 0.9995 or 0.0005 <= share < 0.01
    text = f"{100 * share:.1f}" if has_decimal else f"{100 * share:.0f}"
    if float(text) == 0:  # not "-0"
        text = "0"
    return f"{text} %".replace("-", MINUS)


def count(n: float, one: str, many: str = "") -> str:
    """Write a number with its noun, such as `1 update` or `2,048 updates`; `many` is the plural, by default ONEs."""
    noun = one if n == 1 else many or f"{one}s"
    return f"{n:,.0f} {noun}"
