"""Pictures are gathered, nobody waits for nothing, and a full queue says so."""

import asyncio
import ctypes
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from vitrail.serving import batching
from vitrail.serving.batching import Batcher
from vitrail.serving.limits import Limits, RequestError


def tried(scenario: Callable, compute: Callable, **limits: float) -> list[int]:
    """Runs a scenario with a batcher; the sizes of its batches."""
    sizes = []

    async def run() -> None:
        batcher = Batcher(compute, Limits(images=1, **limits), lambda size, _: sizes.append(size))
        task = asyncio.create_task(batcher.run())
        await scenario(batcher)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        batcher.close()

    asyncio.run(run())
    return sizes


def double(items: list[int]) -> list[int]:
    return [2 * item for item in items]


def test_pictures_that_come_together_are_computed_together_and_get_their_own_answers():
    async def scenario(batcher):
        with batcher.reserve(20):
            answers = await asyncio.gather(*(batcher.submit(n) for n in range(20)))
        assert answers == [2 * n for n in range(20)]

    assert tried(scenario, double, batch=8, wait=1000.0) == [8, 8, 4]


def test_who_is_alone_waits_for_nobody():
    async def scenario(batcher):
        with batcher.reserve(1):
            started = time.perf_counter()
            assert await batcher.submit(3) == 6
        assert time.perf_counter() - started < 2

    assert tried(scenario, double, wait=10_000.0) == [1]


def test_a_picture_waits_for_one_that_is_on_its_way_but_not_forever():
    async def scenario(batcher):
        with batcher.reserve(2):
            assert await batcher.submit(1) == 2  # the second one never comes

        async def late():
            await asyncio.sleep(0.02)
            return await batcher.submit(2)

        with batcher.reserve(2):
            assert await asyncio.gather(batcher.submit(1), late()) == [2, 4]

    assert tried(scenario, double, wait=300.0) == [1, 2]


def test_a_full_queue_is_refused_and_has_room_again_afterwards():
    async def scenario(batcher):
        with batcher.reserve(3), pytest.raises(RequestError) as caught, batcher.reserve(2):
            pass
        assert (caught.value.status, caught.value.code) == (503, "busy")
        assert caught.value.headers == {"Retry-After": "1"}
        with batcher.reserve(4):
            assert batcher.reserved == 4
        assert batcher.reserved == 0

    tried(scenario, double, queue=4)


def test_whoever_has_gone_is_not_computed():
    begun, go = threading.Event(), threading.Event()
    seen = []

    def slow(items: list[int]) -> list[int]:
        begun.set()
        go.wait(10)
        seen.extend(items)
        return items

    async def scenario(batcher):
        with ExitStack() as stack:
            stack.enter_context(batcher.reserve(3))
            first = asyncio.create_task(batcher.submit(1))
            await asyncio.to_thread(begun.wait, 10)
            second = asyncio.create_task(batcher.submit(2))
            third = asyncio.create_task(batcher.submit(3))
            await asyncio.sleep(0)
            second.cancel()
            await asyncio.sleep(0)
            go.set()
            assert await first == 1
            assert await third == 3

    tried(scenario, slow, wait=0.0)
    assert seen == [1, 3]


def test_a_failed_batch_fails_its_own_pictures_alone():
    def picky(items: list[int]) -> list[int]:
        if 13 in items:
            raise RuntimeError("bad luck")
        return items

    async def scenario(batcher):
        with batcher.reserve(1), pytest.raises(RuntimeError, match="bad luck"):
            await batcher.submit(13)
        with batcher.reserve(1):
            assert await batcher.submit(12) == 12

    assert tried(scenario, picky) == [1, 1]


def end(thread: threading.Thread) -> None:
    """Ends a thread as soon as it has something to do."""
    exception = ctypes.py_object(SystemExit)
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), exception) == 1


def test_a_thread_that_ends_is_replaced_and_nobody_waits_for_it(monkeypatch):
    monkeypatch.setattr(batching, "CHECK", 0.3)
    monkeypatch.setattr(batching, "RESTART", 0.3)

    async def scenario(batcher):
        with batcher.reserve(1):
            assert await batcher.submit(1) == 2
            end(batcher.worker)
            with pytest.raises(RequestError, match="restarted") as caught:
                await asyncio.wait_for(batcher.submit(2), 20)
            assert (caught.value.status, batcher.healthy) == (503, False)
            assert await asyncio.wait_for(batcher.submit(3), 20) == 6
            assert batcher.healthy

    assert tried(scenario, double) == [1, 1]


def test_work_that_fails_is_taken_up_again(monkeypatch):
    monkeypatch.setattr(batching, "RESTART", 0.1)

    def forgetful(items: list[int]) -> list[int]:
        return items if 13 not in items else []

    async def scenario(batcher):
        with batcher.reserve(1):
            with pytest.raises(RequestError, match="restarted"):
                await asyncio.wait_for(batcher.submit(13), 20)
            assert await asyncio.wait_for(batcher.submit(12), 20) == 12

    assert tried(scenario, forgetful) == [1]


@pytest.mark.parametrize("kind", [StopIteration, SystemExit, KeyboardInterrupt])
def test_no_exception_of_a_model_ends_more_than_its_batch(kind):
    def hopeless(items: list[int]) -> list[int]:
        raise kind

    async def scenario(batcher):
        with (
            batcher.reserve(1),
            pytest.raises(RuntimeError, match=f"the model raised {kind.__name__}"),
        ):
            await asyncio.wait_for(batcher.submit(1), 20)

    assert tried(scenario, hopeless) == [1]
