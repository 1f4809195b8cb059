"""Load on `vitrail serve` from this machine itself: throughput, latency, errors, memory.

    python benchmarks/serving.py MODEL PHOTO... [--clients 32] [--seconds 60] [--rounds 3]

Each round starts a server and lets one client ask, one request at a time; then many clients at
once; then as many of a second server that computes every picture by itself (--batch 1). Clients are
threads of this process, on the same cores as the server. A request that gets no answer, or another
one than 200 or 503, is an error; so is an answer that differs from the first one to the same
photograph.
"""

import argparse
import http.client
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Seen:
    """What the clients of one trial saw."""

    statuses: Counter[str] = field(default_factory=Counter)
    latencies: list[float] = field(default_factory=list)
    labels: dict[int, set[str]] = field(default_factory=dict)
    seconds: float = 0.0
    memory: list[int] = field(default_factory=list)
    """MiB of the server, twice a second."""

    @property
    def rate(self) -> float:
        return self.statuses["200"] / self.seconds

    def row(self, name: str) -> str:
        """One line."""
        spots = statistics.quantiles(self.latencies, n=100) if len(self.latencies) > 1 else [0] * 99
        half = len(self.memory) // 2
        grown = statistics.median(self.memory[half:]) - statistics.median(self.memory[: half or 1])
        return (
            f"{name:<24} {self.rate:7.2f} images/s   {dict(self.statuses)}   median "
            f"{1000 * spots[49]:.0f} ms, p99 {1000 * spots[98]:.0f} ms   memory "
            f"{self.memory[0]} to {self.memory[-1]} MiB, at most {max(self.memory)}, "
            f"second half {grown:+.0f}   answers alike: {self.alike}"
        )

    @property
    def alike(self) -> bool:
        return all(len(labels) == 1 for labels in self.labels.values())


@contextmanager
def server(model: str, *options: str) -> Iterator[tuple[int, int]]:
    """A server's process and port, until the block ends."""
    command = [sys.executable, "-m", "vitrail", "serve", f"model={model}", "--port", "0", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    port = 0
    for line in process.stderr:
        if found := re.search(r"http://127.0.0.1:(\d+)/", line):
            port = int(found[1])
            break
    threading.Thread(target=process.stderr.read, daemon=True).start()
    try:
        yield process.pid, port
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def client(port: int, photos: list[bytes], end: float, seen: Seen, lock: threading.Lock) -> None:
    """Asks until the time is over."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    number = threading.get_ident() % len(photos)
    while time.perf_counter() < end:
        number = (number + 1) % len(photos)
        start = time.perf_counter()
        try:
            connection.request("POST", "/predict", photos[number])
            answer = connection.getresponse()
            status, body = str(answer.status), answer.read()
        except (OSError, http.client.HTTPException) as error:
            status, body = type(error).__name__, b""
            connection.close()
        with lock:
            seen.statuses[status] += 1
            if status == "200":
                seen.latencies.append(time.perf_counter() - start)
                label = json.loads(body)["results"][0]["top"][0]["label"]
                seen.labels.setdefault(number, set()).add(label)
        if status == "503":
            time.sleep(0.05)


def trial(process: int, port: int, photos: list[bytes], clients: int, seconds: float) -> Seen:
    """So many clients for so long."""
    seen, lock, start = Seen(), threading.Lock(), time.perf_counter()
    end = start + seconds
    threads = [
        threading.Thread(target=client, args=(port, photos, end, seen, lock))
        for _ in range(clients)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
        seen.memory.append(pages * os.sysconf("SC_PAGE_SIZE") >> 20)
        time.sleep(0.5)
    seen.seconds = time.perf_counter() - start
    return seen


def main() -> None:
    """Print a line for each trial, and the medians of the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("photos", nargs="+", type=Path)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    photos = [path.read_bytes() for path in asked.photos]
    short = max(5.0, asked.seconds / 4)
    against_one, against_single = [], []
    for _ in range(asked.rounds):
        with server(asked.model) as (process, port):
            trial(process, port, photos, asked.clients, 3)  # warm
            one = trial(process, port, photos, 1, short)
            print(one.row("one request at a time"), flush=True)
            many = trial(process, port, photos, asked.clients, asked.seconds)
            print(many.row(f"{asked.clients} clients"), flush=True)
        with server(asked.model, "--batch", "1") as (process, port):
            trial(process, port, photos, asked.clients, 3)
            single = trial(process, port, photos, asked.clients, short)
            print(single.row(f"{asked.clients} clients, batch 1"), flush=True)
        against_one.append(many.rate / one.rate)
        against_single.append(many.rate / single.rate)
    print(
        f"batched against one request at a time: {statistics.median(against_one):.2f} "
        f"({', '.join(f'{x:.2f}' for x in against_one)}), against --batch 1: "
        f"{statistics.median(against_single):.2f} ({', '.join(f'{x:.2f}' for x in against_single)})"
    )


if __name__ == "__main__":
    main()
