"""Everything said to a person: progress on stderr, drawn on a terminal and silent in a log."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, runtime_checkable


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
    """One line to stderr, so that stdout holds results alone."""
    sys.stderr.write(line + "\n")
