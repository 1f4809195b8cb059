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


def scaled(value: Number, units: tuple[tuple[Number, str], ...]) -> str:
    """Three digits and the largest unit that leaves a whole; the last unit for anything less."""
    if not math.isfinite(value):
        return NONE
    size, unit = next((pair for pair in units if abs(value) >= pair[0]), units[-1])
    digits = value / size
    # Format `g` would write 1.23e+03 for what is more than three digits.
    return f"{digits:,.0f}{SPACE}{unit}" if digits >= 999.5 else f"{digits:.3g}{SPACE}{unit}"


def operations(exaflops: Number) -> str:
    """`224 exaFLOPs`, `3.1 petaFLOPs`."""
    named = ((1, "exa"), (1e-3, "peta"), (1e-6, "tera"), (1e-9, "giga"))
    return scaled(exaflops, tuple((size, f"{name}FLOPs") for size, name in named))


def joules(value: Number) -> str:
    """`1.24 kWh`, `310 Wh`, `820 J`."""
    return scaled(value, ((3.6e6, "kWh"), (3600, "Wh"), (1, "J")))


def size_of(n_bytes: Number) -> str:
    """`1.5 GiB`, `310 MiB`."""
    return scaled(n_bytes, ((2**30, "GiB"), (2**20, "MiB")))


def days(value: Number) -> str:
    """`680`, `0.0123`: three digits, however little it is."""
    if not math.isfinite(value):
        return NONE
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


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
