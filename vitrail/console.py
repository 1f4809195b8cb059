"""Terminal output: messages and progress on stderr, results on stdout, how numbers are written.

Progress is drawn on a terminal; elsewhere it is a line now and then.
"""

import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any, Protocol, TypeGuard, runtime_checkable

from vitrail.errors import VitrailError

LOG_INTERVAL = 30.0
"""Seconds between two lines of progress without a terminal."""
UNSAFE = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""What a terminal would obey rather than show: control characters, and those that reverse the
direction of writing."""
NONE = "–"
"""Stands for a number that is not known."""
Number = int | float | None


@runtime_checkable
class Advance(Protocol):
    """Moves a progress bar on; `total` is given as soon as it is known."""

    def __call__(self, amount: int, total: int | None = None) -> None: ...


class _LogLines:
    """Progress without a terminal: a line every half minute."""

    def __init__(self, title: str, unit: Callable[[int], str] = "{:,}".format) -> None:
        self.title, self.unit = title, unit
        self.done, self.total = 0, 0
        self.started = self.last = time.monotonic()

    def __call__(self, amount: int, total: int | None = None) -> None:
        self.done += amount
        self.total = total or self.total
        if self.is_due():
            say(f"{self.title}  {self.progress()}")

    def is_due(self) -> bool:
        """Whether it is time for a line, which then counts as written."""
        now = time.monotonic()
        if now - self.last < LOG_INTERVAL:
            return False
        self.last = now
        return True

    def progress(self) -> str:
        """`1,280 of 2,936 (44%), 2 min left`."""
        if not self.total:
            return self.unit(self.done)
        share = f"{self.unit(self.done)} of {self.unit(self.total)}"
        share += f" ({100 * self.done / self.total:.0f}%)"
        if not self.done:
            return share
        left = (time.monotonic() - self.started) * (self.total - self.done) / self.done
        return f"{share}, {duration(left)} left"


def log_progress(
    title: str, visible: bool = True, unit: Callable[[int], str] = "{:,}".format
) -> Advance:
    """Lines in a log; nothing on a terminal, where another bar is shown."""
    if visible and not _on_terminal():
        return _LogLines(title, unit)
    return lambda amount, total=None: None


def _on_terminal() -> bool:
    from rich.console import Console

    return Console(stderr=True).is_terminal


@contextmanager
def _bar(title: str, *columns: Any, transient: bool) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    name = TextColumn("{task.description}", markup=False)
    console = Console(stderr=True)
    with Progress(name, BarColumn(), *columns, console=console, transient=transient) as progress:
        task = progress.add_task(escaped(title), total=None)

        def advance(amount: int, total: int | None = None) -> None:
            progress.update(task, advance=amount, total=total)

        yield advance


@contextmanager
def byte_progress(title: str) -> Iterator[Advance]:
    """A bar with size, speed and time left of a download; lines in a log."""
    if not _on_terminal():
        say(f"fetching {title}")
        yield log_progress(f"fetching {title}", unit=byte_size)
        return
    from rich.progress import DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with _bar(title, *columns, transient=False) as advance:
        yield advance


@contextmanager
def count_progress(title: str, visible: bool = True) -> Iterator[Advance]:
    """A bar that counts images; lines in a log."""
    if not visible or not _on_terminal():
        yield log_progress(title, visible)
        return
    from rich.progress import MofNCompleteColumn, TimeRemainingColumn

    with _bar(title, MofNCompleteColumn(), TimeRemainingColumn(), transient=True) as advance:
        yield advance


class TrainingBar:
    """A bar with loss, learning rate, speed, utilization and time left; lines in a log."""

    def __init__(self, visible: bool = True) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        console = Console(stderr=True)
        columns = (
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[figures]}"),
        )
        self.progress = Progress(
            *columns, console=console, disable=not (visible and console.is_terminal)
        )
        self.task = self.progress.add_task("", total=None, figures="")
        self.lines = _LogLines("") if visible and not console.is_terminal else None
        self.figures = ""

    def __enter__(self) -> "TrainingBar":
        self.progress.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self.progress.stop()

    def update(self, step: int, total: int, figures: Mapping[str, Any]) -> None:
        """Show the state of a run; `figures` is a line of metrics.jsonl."""
        speed = figures["images_per_second"]
        left = (total - step) * figures["seconds"] / max(step, 1)
        parts = [f"loss {figures['loss']:.3f}", f"lr {figures['lr']:.2g}", f"{speed:,.0f} img/s"]
        if figures["mfu"] is not None:
            parts.append(f"MFU {100 * figures['mfu']:.0f}%")
        if figures["input_wait"] >= 0.01:
            parts.append(f"{100 * figures['input_wait']:.0f}% waiting for images")
        self.figures = " · ".join(parts)
        text = f"{self.figures} · eta {duration(left)}"
        self.progress.update(self.task, completed=step, total=total, figures=text)

    def step(self, step: int, total: int, seconds: float) -> None:
        """A line in a log now and then, after `seconds` of training."""
        if self.lines is not None and self.lines.is_due():
            left = f"eta {duration((total - step) * seconds / max(step, 1))}"
            text = " · ".join(filter(None, (self.figures, left)))
            say(f"{self.heading(step, total)}  {text}")

    def heading(self, step: int, total: int) -> str:
        """The beginning of a line about a step, padded so that lines align."""
        return f"step {step:>{len(str(total))}}/{total}"


def byte_size(size: int) -> str:
    """`1.3 GB`, `24.5 MB`."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def duration(seconds: float) -> str:
    """`48 s`, `12 min`, `3.4 h`, `2.1 days`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.1f} days"


def rounded(value: float, places: int) -> str:
    """With so many decimals, `86.6`, and two digits of what is small, `0.018`."""
    return f"{value:,.{places}f}" if value >= 10.0 ** (1 - places) else f"{value:.2g}"


def known(value: Number) -> TypeGuard[int | float]:
    """Whether there is a finite number."""
    return value is not None and math.isfinite(value)


def percent(fraction: Number, digits: int = 2) -> str:
    """`97.31%`."""
    return f"{mean_std(fraction, digits=digits)}%" if known(fraction) else NONE


def between(interval: Sequence[Number] | None, digits: int = 1) -> str:
    """`95.1 to 98.6%`, or nothing if the ends are not known."""
    if interval is None or not all(map(known, interval)):
        return ""
    low, high = (mean_std(end, digits=digits) for end in interval)
    return f"{low} to {high}%"


def mean_std(mean: Number, std: Number = None, *, digits: int = 2, scale: float = 100.0) -> str:
    """`97.10 ± 0.32`, in percent by default."""
    if not known(mean):
        return NONE
    spread = f" ± {scale * std:.{digits}f}" if known(std) else ""
    return f"{scale * mean:.{digits}f}{spread}"


def plural(number: int, thing: str) -> str:
    """`1 class`, `2,000 classes`."""
    ending = "" if number == 1 else "es" if thing.endswith("s") else "s"
    return f"{number:,} {thing}{ending}"


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print aligned columns, never truncated; all but the first and last are numbers."""
    import click

    shown = [[escaped(cell) for cell in row] for row in (columns, *rows)]
    widths = [max(map(width_of, column)) for column in zip(*shown, strict=True)]
    text = {0, len(columns) - 1}

    def line(row: Sequence[str]) -> str:
        cells = (
            padded(cell, width, right=i not in text)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join(cells).rstrip()

    heading, *below = map(line, shown)
    click.secho(heading, bold=True)
    for row in below:
        click.echo(row)


def width_of(text: str) -> int:
    """Terminal columns that a text takes: Chinese characters take two, accents none."""
    from rich.cells import cell_len

    return cell_len(text)


def padded(text: str, width: int, *, right: bool = False) -> str:
    """Pad with spaces on the right, or on the left, up to a width."""
    spaces = " " * (width - width_of(text))
    return spaces + text if right else text + spaces


def echo(text: str = "", *, err: bool = False, end: str = "\n") -> None:
    """Print lines to stdout, or to stderr, with control characters escaped.

    The escapes mean the same text in JSON and in TOML.
    """
    import click

    click.echo("\n".join(map(escaped, text.split("\n"))) + end, err=err, nl=False)


def escaped(text: str) -> str:
    """One line with control characters written as `\\u001b`."""
    return UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def say(line: str) -> None:
    """Print a line to stderr, which leaves stdout to results; only in the main process."""
    if is_main():
        sys.stderr.write(escaped(line) + "\n")


def is_main() -> bool:
    """Whether this is the main one of the processes that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


def import_optional(module: str, purpose: str = "") -> ModuleType | None:
    """Import a module whose package may have been removed; a line says what is skipped then."""
    try:
        return import_module(f"vitrail.{module}")
    except ModuleNotFoundError as error:
        package = f"vitrail.{module.partition('.')[0]}"
        if not (error.name or "").startswith(package):
            raise
        if purpose:
            say(f"{purpose} skipped: {package} is not installed")
        return None


def require(module: str, purpose: str) -> ModuleType:
    """Import a module whose package may have been removed, or say what needs it."""
    found = import_optional(module)
    if found is None:
        package = f"vitrail.{module.partition('.')[0]}"
        raise VitrailError(f"{purpose} needs the package {package}, which is not installed")
    return found
