"""Processes that can be killed, and groups of them that work together.

They are forked, so that none has to import torch again.
"""

import multiprocessing
import os
import socket
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

FORK = multiprocessing.get_context("fork")


def start(function: Callable[..., Any], *arguments: Any) -> multiprocessing.process.BaseProcess:
    """A process that runs the function; it ends with 1 where the function raises."""
    process = FORK.Process(target=function, args=arguments)
    with warnings.catch_warnings():  # newer Pythons warn of threads that the child will not have
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    return process


def together(processes: int, function: Callable[..., Any], *arguments: Any) -> None:
    """Runs the function in so many processes, as torchrun would start them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = [
        start(as_rank, rank, processes, port, function, *arguments) for rank in range(processes)
    ]
    while any(process.is_alive() for process in started):
        if any(process.exitcode for process in started):  # the others would wait for it
            for process in started:
                process.kill()
        time.sleep(0.02)
    assert [process.exitcode for process in started] == [0] * processes


def as_rank(rank: int, world: int, port: int, function: Callable[..., Any], *rest: Any) -> None:
    """The function in an environment like torchrun's."""
    os.environ |= {
        "RANK": f"{rank}",
        "LOCAL_RANK": f"{rank}",
        "WORLD_SIZE": f"{world}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": f"{port}",
    }
    torch.set_num_threads(1)
    function(*rest)
