"""Many requests, one model: pictures are gathered into batches, and one thread computes them.

All bookkeeping happens in the event loop, so none of it needs a lock; the thread only computes.
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
"""Seconds after which a thread that has ended is noticed."""
RESTART = 1.0
"""Seconds from then until another one starts; /health says so meanwhile."""
RESTARTING = "the thread of a model has ended, and another one is being started"


@dataclass(frozen=True)
class Job:
    """One picture that waits for its answer."""

    item: Any
    answer: asyncio.Future[Any]
    since: float


class Batcher:
    """The queue in front of one model."""

    def __init__(
        self,
        compute: Callable[[list[Any]], Sequence[Any]],
        limits: Limits,
        done: Callable[[int, float], None],
    ) -> None:
        self.compute, self.limits = compute, limits
        self.done = done
        """Told the size of each batch and its seconds."""
        self.reserved = 0
        self.jobs: asyncio.Queue[Job] = asyncio.Queue()
        self.batch: list[Job] = []
        """Those that have left the queue."""
        self.work: asyncio.Task[None] | None = None
        self.open()

    def open(self) -> None:
        """A thread, which starts with the first batch."""
        self.worker: threading.Thread | None = None
        self.thread = ThreadPoolExecutor(1, "model", self.started)

    def started(self) -> None:
        """Keeps the thread: the executor does not tell whether it is alive."""
        self.worker = threading.current_thread()

    @property
    def healthy(self) -> bool:
        """Whether batches are computed."""
        thread = self.worker is None or self.worker.is_alive()
        return thread and not (self.work and self.work.done())

    @contextmanager
    def room(self, count: int) -> Iterator[None]:
        """Places for so many pictures, from before they are read until they are answered."""
        if self.reserved + count > self.limits.queue:
            raise busy(f"{self.reserved} pictures are waiting already")
        self.reserved += count
        try:
            yield
        finally:
            self.reserved -= count

    async def answer(self, item: Any) -> Any:
        """What the model makes of one picture."""
        loop = asyncio.get_running_loop()
        job = Job(item, loop.create_future(), loop.time())
        self.jobs.put_nowait(job)
        return await job.answer

    async def run(self) -> None:
        """Computes until cancelled; where the thread ends or the work fails, both start again."""
        while True:
            self.work = asyncio.create_task(self.batches())
            try:
                while self.healthy:
                    await asyncio.wait({self.work}, timeout=CHECK)
            finally:
                self.work.cancel()
                failed = (await asyncio.gather(self.work, return_exceptions=True))[0]
            cause = failed if isinstance(failed, Exception) else None
            logging.getLogger("uvicorn.error").error(RESTARTING, exc_info=cause)
            self.give_up()
            await asyncio.sleep(RESTART)
            self.open()

    def give_up(self) -> None:
        """Ends what is left of the thread, and tells those whose batch is lost."""
        self.thread.shutdown(wait=False)
        for job in self.batch:
            if not job.answer.done():
                job.answer.set_exception(busy(RESTARTING))

    async def batches(self) -> None:
        """One batch after the other."""
        loop = asyncio.get_running_loop()
        while True:
            await self.gather()
            # Whoever asked may have run out of time and gone.
            batch = [job for job in self.batch if not job.answer.done()]
            if not batch:
                continue
            start = loop.time()
            work = loop.run_in_executor(self.thread, self.computed, [job.item for job in batch])
            await asyncio.wait({work})
            deliver(batch, work)
            self.done(len(batch), loop.time() - start)

    async def gather(self) -> None:
        """A batch of at least one job, and those that come before the first one's time is up."""
        self.batch = batch = []
        batch.append(await self.jobs.get())
        deadline = batch[0].since + self.limits.wait / 1000
        # Who is alone waits for nobody: all pictures that could still come have a place reserved.
        while len(batch) < min(self.limits.batch, max(self.reserved, 1)):
            if not self.jobs.empty():
                batch.append(self.jobs.get_nowait())
                continue
            try:
                async with asyncio.timeout_at(deadline):
                    batch.append(await self.jobs.get())
            except TimeoutError:
                break

    def computed(self, items: list[Any]) -> Sequence[Any]:
        """The answers, from the thread."""
        try:
            return self.compute(items)
        except (StopIteration, SystemExit, KeyboardInterrupt) as error:
            # No future accepts the first, and the event loop would end with the others.
            raise RuntimeError(f"the model raised {type(error).__name__}") from error

    def close(self) -> None:
        """Ends the thread."""
        self.thread.shutdown()


def deliver(batch: Sequence[Job], work: asyncio.Future[Sequence[Any]]) -> None:
    """To each job its answer, or to all of them what went wrong."""
    error = work.exception()
    answers = [None] * len(batch) if error else work.result()
    for job, answer in zip(batch, answers, strict=True):
        if job.answer.done():
            continue
        if error:
            job.answer.set_exception(error)
        else:
            job.answer.set_result(answer)
