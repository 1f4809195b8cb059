"""Collects the images of many requests into batches, which one worker thread per model computes.

All bookkeeping happens in the event loop and needs no lock; the thread only computes.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vitrail.serving.limits import Limits, busy

CHECK = 1.0
"""Seconds between checks that the worker thread is alive."""
RESTART = 1.0
"""Seconds until a dead thread is replaced; /health reports it meanwhile."""
RESTARTING = "the worker thread of a model ended and is being restarted"


@dataclass(frozen=True)
class _Job:
    item: Any
    result: asyncio.Future[Any]
    since: float


class Batcher:
    """The queue and worker thread of one model; `on_batch` gets each batch's size and seconds."""

    def __init__(
        self,
        compute: Callable[[list[Any]], Sequence[Any]],
        limits: Limits,
        on_batch: Callable[[int, float], None],
    ) -> None:
        self._compute, self._limits, self._on_batch = compute, limits, on_batch
        self.reserved = 0
        self._queue: asyncio.Queue[_Job] = asyncio.Queue()
        self._batch: list[_Job] = []
        """Jobs that have left the queue."""
        self._task: asyncio.Task[None] | None = None
        self._start_executor()

    def _start_executor(self) -> None:
        # The executor does not say whether its thread is alive, so the thread is remembered.
        def remember() -> None:
            self.worker = threading.current_thread()

        self.worker: threading.Thread | None = None
        self._executor = ThreadPoolExecutor(1, "model", remember)

    @property
    def healthy(self) -> bool:
        """Whether batches are being computed."""
        alive = self.worker is None or self.worker.is_alive()
        return alive and not (self._task and self._task.done())

    @contextmanager
    def reserve(self, count: int) -> Iterator[None]:
        """Holds places for `count` images, from before they are read until they have results."""
        if self.reserved + count > self._limits.queue:
            raise busy(f"{self.reserved} images are already waiting")
        self.reserved += count
        try:
            yield
        finally:
            self.reserved -= count

    async def submit(self, item: Any) -> Any:
        """The model's result for one item."""
        loop = asyncio.get_running_loop()
        job = _Job(item, loop.create_future(), loop.time())
        self._queue.put_nowait(job)
        return await job.result

    async def run(self) -> None:
        """Computes batches until cancelled; starts again if the thread dies or the task fails."""
        while True:
            self._task = asyncio.create_task(self._process())
            try:
                while self.healthy:
                    await asyncio.wait({self._task}, timeout=CHECK)
            finally:
                self._task.cancel()
                failed = (await asyncio.gather(self._task, return_exceptions=True))[0]
            cause = failed if isinstance(failed, Exception) else None
            logging.getLogger("uvicorn.error").error(RESTARTING, exc_info=cause)
            self._executor.shutdown(wait=False)
            for job in self._batch:
                if not job.result.done():
                    job.result.set_exception(busy(RESTARTING))
            await asyncio.sleep(RESTART)
            self._start_executor()

    async def _process(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._collect()
            # Requests that timed out meanwhile are not computed.
            batch = [job for job in self._batch if not job.result.done()]
            if not batch:
                continue
            start = loop.time()
            items = [job.item for job in batch]
            work = loop.run_in_executor(self._executor, self._compute_in_thread, items)
            await asyncio.wait({work})
            error = work.exception()
            for job, result in zip(batch, items if error else work.result(), strict=True):
                if job.result.done():
                    continue
                if error:
                    job.result.set_exception(error)
                else:
                    job.result.set_result(result)
            self._on_batch(len(batch), loop.time() - start)

    async def _collect(self) -> None:
        """Waits for a job, then for others until the batch is full or the wait is over."""
        self._batch = batch = []
        batch.append(await self._queue.get())
        deadline = batch[0].since + self._limits.wait / 1000
        # A single image does not wait: every image that could still come has a place reserved.
        while len(batch) < min(self._limits.batch, max(self.reserved, 1)):
            if not self._queue.empty():
                batch.append(self._queue.get_nowait())
                continue
            try:
                async with asyncio.timeout_at(deadline):
                    batch.append(await self._queue.get())
            except TimeoutError:
                break

    def _compute_in_thread(self, items: list[Any]) -> Sequence[Any]:
        try:
            return self._compute(items)
        except (StopIteration, SystemExit, KeyboardInterrupt) as error:
            # A future does not accept the first, and the others would end the event loop.
            raise RuntimeError(f"the model raised {type(error).__name__}") from error

    def close(self) -> None:
        """Ends the worker thread."""
        self._executor.shutdown()
