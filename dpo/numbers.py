import math


def compact(value: float, digits: int = 3) -> str:
    """Without an exponent if large."""
    return f"{value:,.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"


def figure(value: float, digits: int = 3) -> str:
    """With a true minus sign; "unknown" if not finite."""
    if not math.isfinite(value):
        return "unknown"
    text = compact(value, digits)
    return text if "e" in text else text.replace("-", "\N{MINUS SIGN}")  # 1e-05 keeps its hyphen


def signed(value: float) -> str:
    return f"+{figure(value)}" if value >= 0 else figure(value)


def percent(share: float) -> str:
    """With a decimal near 0 and 1."""
    if not math.isfinite(share):
        return "unknown"
    digits = 1 if 0.99 < share < 0.9995 or 0.0005 <= share < 0.01 else 0
    text = f"{100 * share:.{digits}f}"
    return ("0 %" if float(text) == 0 else f"{text} %").replace("-", "\N{MINUS SIGN}")


def count(n: float, one: str, many: str = "") -> str:
    """`1 update`, `2,048 updates`."""
    return f"{n:,.0f} {one if n == 1 else many or one + 's'}"
