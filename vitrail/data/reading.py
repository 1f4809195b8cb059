"""Many images read in parallel: in threads where decoding is all there is to do, in processes
where something is computed of each image."""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from itertools import islice
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
from PIL import Image

from vitrail.data.dataset import Broken, Source, image_or_reason
from vitrail.data.decode import quiet
from vitrail.errors import FailureError

T = TypeVar("T")

Progress = Callable[[int], None] | None
"""Called with the number of images done since the last call."""
_Look = Callable[[Image.Image], Any]
"""What is computed of an image; it travels to other processes, so it is a plain function."""
CHUNK = 32
AHEAD = 128
"""Chunks that each process is given at a time."""


def in_threads(function: Callable[[int], T], count: int, ahead: int = 32) -> Iterator[T]:
    """`function` of 0, 1, … count - 1, in order; at most `ahead` results wait in memory.

    Decoding, reading and hashing leave the interpreter to other threads.
    """
    # Decoding sets Pillow's warnings aside for all threads at once, hence here as well.
    with quiet(), ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for first in range(0, count, ahead):
            yield from pool.map(function, range(first, min(first + ahead, count)))


def read_all(
    source: Source, look: _Look, *, workers: int = 0, progress: Progress = None
) -> Iterator[tuple[int, Any]]:
    """The number of each image with what `look` makes of it, or with `Broken`.

    The order is that of the source's blocks, however many processes read.
    """
    order = np.argsort(source.blocks, kind="stable")
    chunks = (order[start : start + CHUNK].tolist() for start in range(0, len(order), CHUNK))
    if workers:
        done = _in_processes(source, look, chunks, min(workers, -(-len(order) // CHUNK)))
    else:
        done = ((chunk, _read_some(source, look, chunk)) for chunk in chunks)
    for chunk, results in done:
        yield from zip(chunk, results, strict=True)
        if progress is not None:
            progress(len(chunk))


def _read_some(source: Source, look: _Look, chunk: list[int]) -> list[Any]:
    results = []
    for index in chunk:
        image = image_or_reason(source, index)
        broken = isinstance(image, str)
        results.append(Broken(source.names[index], image) if broken else look(image))
    return results


def _in_processes(
    source: Source, look: _Look, chunks: Iterator[list[int]], workers: int
) -> Iterator[tuple[list[int], list[Any]]]:
    """The chunks in their order, read by several processes."""
    if not workers:
        return
    context = _process_context(source, look)
    pool = ProcessPoolExecutor(workers, context, initializer=_prepare, initargs=(source, look))
    try:
        # A pool takes all that it is given at once: of a large set, only some at a time.
        while some := list(islice(chunks, AHEAD * workers)):
            yield from zip(some, pool.map(_read_prepared, some), strict=True)
    except BrokenProcessPool:
        raise FailureError(
            "a process that read images died, perhaps for lack of memory; try fewer workers"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _process_context(source: Source, look: _Look) -> BaseContext:
    """How processes are started.

    A fork of a process with threads, which torch starts, may never wake up. A fresh process that
    imports once, and is forked from then on, costs little more; not every system has that.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([type(source).__module__, look.__module__])
    return context


_prepared: dict[str, Any] = {}
"""What a worker process reads from: it is sent there once, not with every chunk."""


def _prepare(source: Source, look: _Look) -> None:
    _prepared.update(source=source, look=look)


def _read_prepared(chunk: list[int]) -> list[Any]:
    return _read_some(_prepared["source"], _prepared["look"], chunk)


def write_cached(path: Path, write: Callable[[IO[bytes]], None]) -> None:
    """A file of the cache, whole or not at all; one that cannot be written only costs time."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            write(file)
        temporary.replace(path)
