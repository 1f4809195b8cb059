"""Many requests, one model: pictures are gathered into batches, and one thread computes them.

All bookkeeping happens in the event loop, so none of it needs a lock; the thread only computes.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vitrail.serving.limits import Limits, busy


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
        self.thread = ThreadPoolExecutor(1)

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
        """One batch after the other, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            # Whoever asked may have run out of time and gone.
            batch = [job for job in await self.gather() if not job.answer.done()]
            if not batch:
                continue
            start = loop.time()
            work = loop.run_in_executor(self.thread, self.compute, [job.item for job in batch])
            await asyncio.wait({work})
            deliver(batch, work)
            self.done(len(batch), loop.time() - start)

    async def gather(self) -> list[Job]:
        """At least one job, and those that come before the first one's time is up."""
        batch = [await self.jobs.get()]
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
        return batch

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
