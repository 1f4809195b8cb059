"""Everything said to a person: progress on stderr, drawn on a terminal and silent in a log."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Advance(Protocol):
    """Moves a progress bar on; `total` is told as soon as it is known."""

    def __call__(self, amount: int, total: int | None = None) -> None: ...


@contextmanager
def byte_progress(title: str) -> Iterator[Advance]:
    """A bar with size, speed and time left while a file is fetched; plain lines in a log."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = Console(stderr=True)
    if not console.is_terminal:
        say(f"fetching {title}")
        yield lambda amount, total=None: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=None)

        def advance(amount: int, total: int | None = None) -> None:
            progress.update(task, advance=amount, total=total)

        yield advance


class TrainingBar:
    """A bar with loss, learning rate, speed, utilisation and time left; nothing in a log."""

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

    def __enter__(self) -> "TrainingBar":
        self.progress.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self.progress.stop()

    def update(self, step: int, total: int, figures: Mapping[str, Any]) -> None:
        """Shows where a run is; `figures` is a line of metrics.jsonl."""
        speed = figures["images_per_second"]
        left = (total - step) * figures["seconds"] / max(step, 1)
        parts = [f"loss {figures['loss']:.3f}", f"lr {figures['lr']:.2g}", f"{speed:,.0f} img/s"]
        if figures["mfu"] is not None:
            parts.append(f"MFU {100 * figures['mfu']:.0f} %")
        parts.append(f"eta {duration(left)}")
        self.progress.update(self.task, completed=step, total=total, figures=" · ".join(parts))

    def heading(self, step: int, total: int) -> str:
        """How a line about a step begins, so that such lines stand in columns."""
        return f"step {step:>{len(str(total))}}/{total}"


@contextmanager
def count_progress(title: str, visible: bool = True) -> Iterator[Advance]:
    """A bar that counts pictures; one plain line in a log."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    console = Console(stderr=True)
    if not visible or not console.is_terminal:
        yield lambda amount, total=None: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Remaining())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(title, total=None)

        def advance(amount: int, total: int | None = None) -> None:
            progress.update(task, advance=amount, total=total)

        yield advance


def duration(seconds: float) -> str:
    """A time as a person says it: `48 s`, `12 min`, `3.4 h`, `2.1 days`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.1f} days"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Aligned columns on stdout, never cut: words to the left, numbers to the right."""
    import click

    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
    words = {0, len(columns) - 1}

    def line(row: Sequence[str]) -> str:
        cells = (
            cell.ljust(width) if i in words else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join(cells).rstrip()

    click.secho(line(columns), bold=True)
    for row in rows:
        click.echo(line(row))


def say(line: str) -> None:
    """One line to stderr, so that stdout holds results alone; from one process of several."""
    if is_main():
        sys.stderr.write(line + "\n")


def is_main() -> bool:
    """Whether this process speaks for all that torchrun started."""
    return os.environ.get("RANK", "0") == "0"
