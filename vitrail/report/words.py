"""Numbers as people read them."""

import math

Number = int | float

NONE = "–"
SPACE = "\N{NO-BREAK SPACE}"


def percent(fraction: Number, n: int = 0) -> str:
    """`97.3 %`; with two digits where there are images enough to tell them apart."""
    if not math.isfinite(fraction):
        return NONE
    return f"{100 * fraction:.{1 if n < 1000 else 2}f}{SPACE}%"


def between(span: tuple[float, float], n: int = 0) -> str:
    """`95.1 to 98.6 %`, or nothing where the ends are not known."""
    if not all(math.isfinite(end) for end in span):
        return ""
    low, high = (percent(end, n) for end in span)
    return f"{low.removesuffix(SPACE + '%')} to {high}"


def fixed(value: Number, digits: int = 3) -> str:
    """`0.973`."""
    return f"{value:.{digits}f}" if math.isfinite(value) else NONE


def count(value: Number) -> str:
    """`5,717,416`."""
    return f"{value:,.0f}" if math.isfinite(value) else NONE


def duration(seconds: Number) -> str:
    """`38 s`, `46 min`, `2 h 05 min`."""
    if not math.isfinite(seconds) or seconds < 0:
        return NONE
    if seconds < 10:
        return f"{seconds:.1f}{SPACE}s"
    if seconds < 120:
        return f"{seconds:.0f}{SPACE}s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes}{SPACE}min"
    return f"{minutes // 60:,}{SPACE}h{SPACE}{minutes % 60:02d}{SPACE}min"


def plural(number: int, thing: str) -> str:
    """`1 class`, `2 classes`."""
    ending = "" if number == 1 else "es" if thing.endswith("s") else "s"
    return f"{number:,}{SPACE}{thing}{ending}"


def short(text: str, most: int = 60) -> str:
    """The beginning and the end of a long text: both tell file names apart."""
    if len(text) <= most:
        return text
    tail = most // 3
    return f"{text[: most - tail - 1]}…{text[-tail:]}"
