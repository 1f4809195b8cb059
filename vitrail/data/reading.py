"""Every picture of a source looked at once, in one process or in several."""

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from multiprocessing.context import BaseContext
from typing import Any

import numpy as np
from PIL import Image

from vitrail.data.dataset import Source
from vitrail.errors import FailureError, VitrailError

Progress = Callable[[int], None] | None
"""Told how many more pictures are done."""
Look = Callable[[Image.Image], Any]
"""What is kept of a picture; it travels to other processes, so it is a plain function."""
CHUNK = 32
AHEAD = 128
"""Chunks that each process is given at a time."""


@dataclass(frozen=True)
class Broken:
    """A picture that is none, and why."""

    name: str
    reason: str


def read_all(
    source: Source, look: Look, *, workers: int = 0, progress: Progress = None
) -> Iterator[tuple[int, Any]]:
    """The number of each picture with what `look` makes of it, or with `Broken`.

    The order is that of the source's blocks, however many processes read.
    """
    order = np.argsort(source.blocks, kind="stable")
    chunks = (order[start : start + CHUNK].tolist() for start in range(0, len(order), CHUNK))
    if workers:
        done = in_processes(source, look, chunks, min(workers, -(-len(order) // CHUNK)))
    else:
        done = ((chunk, read_some(source, look, chunk)) for chunk in chunks)
    names = None
    for chunk, found in done:
        for index, seen in zip(chunk, found, strict=True):
            if isinstance(seen, VitrailError):
                # A subset makes the list of its names anew each time: once is enough.
                names = names or source.names
                seen = Broken(names[index], str(seen))
            yield index, seen
        if progress is not None:
            progress(len(chunk))


def read_some(source: Source, look: Look, chunk: list[int]) -> list[Any]:
    """A few pictures, one after the other; the error in place of one that is broken."""
    found = []
    for index in chunk:
        try:
            found.append(look(source.picture(index)))
        except FailureError:
            raise  # a network or a disk that fails is no fault of the picture's
        except VitrailError as error:
            found.append(error)
    return found


def in_processes(
    source: Source, look: Look, chunks: Iterator[list[int]], workers: int
) -> Iterator[tuple[list[int], list[Any]]]:
    """The chunks in their order, read by several processes."""
    if not workers:
        return
    context = process_context(source, look)
    pool = ProcessPoolExecutor(workers, context, initializer=prepare, initargs=(source, look))
    try:
        # A pool is given all at once what it is given: of a large set, only some at a time.
        while some := list(islice(chunks, AHEAD * workers)):
            yield from zip(some, pool.map(read_prepared, some), strict=True)
    except BrokenProcessPool:
        raise FailureError(
            "a process that read pictures died, perhaps for want of memory; try fewer workers"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def process_context(source: Source, look: Look) -> BaseContext:
    """How processes are started.

    A fork of a process with threads, which torch starts, may never wake up. A fresh process that
    imports once, and is forked from then on, costs little more; not every system has that.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([type(source).__module__, look.__module__])
    return context


prepared: dict[str, Any] = {}
"""What a worker process reads from: it is sent there once, not with every chunk."""


def prepare(source: Source, look: Look) -> None:
    """Runs first in each worker process."""
    prepared.update(source=source, look=look)


def read_prepared(chunk: list[int]) -> list[Any]:
    """A few pictures of the source this worker process was given."""
    return read_some(prepared["source"], prepared["look"], chunk)
