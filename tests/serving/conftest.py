"""Small models behind the API, in this process and behind a port."""

import io
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import uvicorn
from PIL import Image
from starlette.applications import Starlette
from starlette.testclient import TestClient

import vitrail
from tests.models import small
from vitrail import Classifier
from vitrail.data.preprocessing import Preprocessing
from vitrail.serving.app import application
from vitrail.serving.connections import configuration
from vitrail.serving.limits import Limits
from vitrail.serving.models import serve_model

OWN = ("token", "hosts", "origins")
"""Options of the application itself, rather than limits."""
LABELS = tuple(f"kind {n}" for n in range(7))


def ready(kind: str = "vit", **options: object) -> Classifier:
    """A small model with classes and preprocessing, the same every time."""
    torch.manual_seed(1)
    model = small(kind, **options)
    model.preprocess = Preprocessing(size=(64, 64), short_side=72)
    model.labels = LABELS if model.head is not None else ()
    return model


def image(seed: int = 0, size: tuple[int, int] = (80, 100), kind: str = "PNG") -> bytes:
    """A picture's file."""
    rough = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(rough).resize(size).save(file, kind)
    return file.getvalue()


@pytest.fixture(scope="session")
def model() -> Classifier:
    return ready()


@pytest.fixture
def client(model) -> Iterator[TestClient]:
    with clients(model) as found:
        yield found


@contextmanager
def clients(*models: Classifier, **options: object) -> Iterator[TestClient]:
    """Asks models called a, b, …; options are limits, or the application's."""
    with TestClient(served(*models, **options), raise_server_exceptions=False) as found:
        yield found


def served(*models: Classifier, **options: object) -> Starlette:
    own = {name: options.pop(name) for name in OWN if name in options}
    named = [serve_model(model, chr(ord("a") + n)) for n, model in enumerate(models)]
    return application(named, Limits(**options), **own)


@contextmanager
def behind_a_port(*models: Classifier, **options: object) -> Iterator[str]:
    """A server in a thread of this process."""
    limits = Limits(**{name: value for name, value in options.items() if name not in OWN})
    server = uvicorn.Server(configuration(served(*models, **options), limits))
    with socket.create_server(("127.0.0.1", 0)) as door:
        thread = threading.Thread(target=server.run, args=([door],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{door.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="session")
def weights(tmp_path_factory):
    path = tmp_path_factory.mktemp("served") / "model.safetensors"
    vitrail.save(ready(), path)
    return path


@contextmanager
def started(*arguments: object) -> Iterator[tuple[subprocess.Popen, str]]:
    """`vitrail serve` in a process of its own, and where it is."""
    command = [sys.executable, "-m", "vitrail", "serve", *map(str, arguments), "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    log, address = [], ""
    for line in process.stderr:
        log.append(line)
        if found := re.search(r"http://[\w.]+:\d+", line):
            address = found[0]
            break
    assert address, "".join(log)
    rest = threading.Thread(target=lambda: log.extend(process.stderr))
    rest.start()
    try:
        yield process, address
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(60)
        rest.join()
        process.stderr.close()
    assert "Traceback" not in "".join(log), "".join(log)


@pytest.fixture(scope="session")
def server(weights) -> Iterator[str]:
    with started(f"first={weights}", f"second={weights}") as (_, address):
        yield address
