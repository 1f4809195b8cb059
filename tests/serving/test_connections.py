"""Clients that send too slowly, too much or nothing at all keep nobody else from being served."""

import http.client
import json
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from urllib.parse import urlsplit

import pytest

from tests.serving.conftest import behind_a_port, image, ready
from tests.serving.test_batching import end
from tests.serving.test_server import ask
from vitrail.errors import VitrailError
from vitrail.serving import batching, requests
from vitrail.serving.connections import READ_SIZE, Connection, allow_files

POST = b"POST /predict HTTP/1.1\r\nHost: localhost\r\n"


@contextmanager
def connected(address: str, sent: bytes = b"") -> Iterator[socket.socket]:
    host = urlsplit(address)
    with socket.create_connection((host.hostname, host.port), timeout=20) as found:
        found.sendall(sent)
        yield found


def is_closed(connection: socket.socket) -> bool:
    """Whether the server has closed a connection; answers that have come are thrown away."""
    connection.setblocking(False)
    try:
        while connection.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


def sent_until_closed(connection: socket.socket, data: bytes, every: float, most: int) -> int:
    """How often data could be sent; at most so often."""
    for count in range(most):
        try:
            connection.sendall(data)
        except ConnectionError:
            return count
        time.sleep(every)
    return most


def awaited(condition: Callable[[], bool], seconds: float = 20) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


@pytest.mark.parametrize("sent", [b"", b"GET /hea", POST + b"Content-Length: 99\r\n\r\nx"])
def test_many_connections_that_wait_do_not_keep_others_out(model, sent):
    with behind_a_port(model, connections=8, idle=60.0) as address, ExitStack() as stack:
        waiting = [stack.enter_context(connected(address, sent)) for _ in range(40)]
        assert ask(address, "POST", "/predict", image())[0] == 200
        assert awaited(lambda: sum(map(is_closed, waiting)) == 33)


def test_a_connection_is_closed_for_a_new_one_only_where_it_waits():
    model = ready()
    begun, go = threading.Event(), threading.Event()

    def held(*_):
        begun.set()
        go.wait(20)

    with behind_a_port(model, connections=1) as address:
        model.norm.register_forward_pre_hook(held)
        answers = []
        body = image()
        asking = threading.Thread(
            target=lambda: answers.append(ask(address, "POST", "/predict", body)[0])
        )
        asking.start()
        assert begun.wait(20)
        status, said = ask(address, "GET", "/health")
        go.set()
        asking.join()
    assert (status, json.loads(said)["error"]["code"]) == (503, "busy")
    assert answers == [200]


@pytest.mark.parametrize("before", [b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_headers_that_come_byte_by_byte_are_not_waited_for(model, before):
    with behind_a_port(model, idle=0.5) as address, connected(address, before) as slow:
        slow.sendall(b"GET /health HTTP/1.1\r\nX-Slow: ")
        assert sent_until_closed(slow, b"x", 0.1, 150) < 150


def test_a_connection_that_sends_nothing_is_closed(model):
    with behind_a_port(model, idle=0.5) as address, connected(address) as silent:
        assert silent.recv(1) == b""


@pytest.mark.parametrize(
    ("limits", "data", "every"),
    [({"idle": 60.0, "megabytes": 0.5}, bytes(1 << 18), 0.0), ({"idle": 0.5}, b"x", 0.1)],
)
@pytest.mark.parametrize("token", ["", "s3cret"])
def test_what_follows_a_refusal_is_not_read_without_end(model, limits, data, every, token):
    path = b"/predict" if token else b"/health"
    headers = b" HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000000\r\n\r\n"
    with (
        behind_a_port(model, token=token, **limits) as address,
        connected(address, b"POST " + path + headers) as endless,
    ):
        assert endless.recv(1 << 16).startswith(b"HTTP/1.1 401" if token else b"HTTP/1.1 405")
        assert sent_until_closed(endless, data, every, 150) < 150


def test_a_refused_upload_of_the_usual_size_is_answered_and_the_connection_stays(model):
    with behind_a_port(model, token="s3cret") as address:
        connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=20)
        for _ in range(2):
            connection.request("POST", "/predict", bytes(8 << 20))
            answer = connection.getresponse()
            assert (answer.status, b"unauthorized" in answer.read()) == (401, True)
        connection.close()


def test_a_client_that_does_not_read_its_answers_is_left(model):
    asked = b"GET /samples/daisy HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with behind_a_port(model, seconds=0.5) as address, connected(address) as deaf:
        deaf.sendall(asked * 1000)
        assert sent_until_closed(deaf, b"\r\n", 0.1, 150) < 150


def test_bytes_are_parsed_in_slices(model, monkeypatch):
    sizes = []
    received = Connection.data_received

    def noted(self: Connection, data: bytes) -> None:
        sizes.append(len(data))
        received(self, data)

    monkeypatch.setattr(Connection, "data_received", noted)
    with behind_a_port(model) as address:
        assert ask(address, "POST", "/predict", bytes(1 << 20))[0] == 422
    assert max(sizes) <= READ_SIZE


def test_a_form_is_parsed_while_others_are_answered(model, monkeypatch):
    begun, go = threading.Event(), threading.Event()

    def held(*_):
        begun.set()
        assert go.wait(20)
        return []

    monkeypatch.setattr(requests, "_form_files", held)
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    with behind_a_port(model) as address:
        answers = []
        asking = threading.Thread(
            target=lambda: answers.append(ask(address, "POST", "/predict", b"x", **headers)[0])
        )
        asking.start()
        assert begun.wait(20)
        assert ask(address, "GET", "/health")[0] == 200
        go.set()
        asking.join()
    assert answers == [400]


def test_health_tells_that_the_thread_of_a_model_has_ended(model, monkeypatch):
    monkeypatch.setattr(batching, "CHECK", 0.2)
    monkeypatch.setattr(batching, "RESTART", 3.0)
    with behind_a_port(model) as address:
        before = set(threading.enumerate())
        assert ask(address, "POST", "/predict", image())[0] == 200
        (thread,) = [x for x in set(threading.enumerate()) - before if x.name.startswith("model")]
        end(thread)
        status, said = ask(address, "POST", "/predict", image())
        assert (status, b"restarted" in said) == (503, True)
        status, said = ask(address, "GET", "/health")
        assert (status, json.loads(said)["error"]["code"]) == (503, "busy")
        assert awaited(lambda: ask(address, "GET", "/health")[0] == 200)
        assert ask(address, "POST", "/predict", image())[0] == 200


def test_the_limit_on_open_files_is_raised_where_connections_need_it(monkeypatch):
    limits = {"now": (256, 4096)}
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.update(now=new))
    allow_files(512)
    assert limits["now"] == (896, 4096)
    allow_files(100)
    assert limits["now"] == (896, 4096)
    with pytest.raises(VitrailError, match=r"--connections 5000 needs 5384 open files.* 4096"):
        allow_files(5000)
