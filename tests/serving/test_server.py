"""The server as a process: its description, its signals, its doors."""

import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from torch.utils.hooks import RemovableHandle

from tests.serving.conftest import behind_a_port, image, ready, started
from vitrail import Classifier
from vitrail.cli import main
from vitrail.errors import FailureError, VitrailError
from vitrail.serving.server import bind, check_access, local_names


def ask(address: str, method: str, path: str, body: bytes = b"", **headers: str):
    """Status and body of one request on a connection of its own."""
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


def test_schemathesis_finds_nothing(server, tmp_path):
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server}/openapi.json"]
    command += ["--max-examples", "5", "--phases", "examples,coverage,fuzzing", "--seed", "1"]
    environment = os.environ | {"SCHEMATHESIS_HOOKS": "tests.serving.hooks"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    # All but the description itself, which schemathesis leaves out.
    assert "Tested: 11" in done.stdout


def test_a_server_that_is_told_to_end_answers_what_it_has_accepted(weights):
    with started(weights, "--batch", "1", "--seconds", "60") as (process, address):
        body = image(size=(2000, 2000))
        answers = []
        asking = [
            threading.Thread(
                target=lambda: answers.append(ask(address, "POST", "/predict", body)[0])
            )
            for _ in range(12)
        ]
        for thread in asking:
            thread.start()
        while b'"model":12' not in ask(address, "GET", "/health")[1] and not answers:
            time.sleep(0.005)
        assert len(answers) < 12
        process.send_signal(signal.SIGTERM)
        for thread in asking:
            thread.join()
        assert answers == [200] * 12
        assert process.wait(30) == 0
        with pytest.raises(ConnectionRefusedError):
            ask(address, "GET", "/health")


def test_a_slow_upload_is_ended_and_others_are_not_held_up(model):
    with behind_a_port(model, seconds=1.5) as address:
        host = urlsplit(address)
        with socket.create_connection((host.hostname, host.port), timeout=30) as slow:
            slow.sendall(
                b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\nx"
            )
            assert ask(address, "POST", "/predict", image())[0] == 200
            assert slow.recv(2000).startswith(b"HTTP/1.1 408 ")


def slowed(model: Classifier, seconds: float) -> RemovableHandle:
    """Lets each batch of the model take so long."""
    return model.norm.register_forward_pre_hook(lambda *_: time.sleep(seconds))


def test_no_answer_in_time_is_504_and_the_next_request_is_served():
    model = ready()
    with behind_a_port(model, seconds=0.3) as address:
        hook = slowed(model, 1.0)
        status, said = ask(address, "POST", "/predict", image())
        assert (status, b"timeout" in said) == (504, True)
        hook.remove()
        time.sleep(1)
        assert ask(address, "POST", "/predict", image())[0] == 200


def test_a_full_queue_is_503_and_says_when_to_come_back():
    model = ready()
    with behind_a_port(model, queue=2, images=2) as address:
        hook = slowed(model, 0.5)
        answers = []
        asking = [
            threading.Thread(
                target=lambda: answers.append(ask(address, "POST", "/predict", image())[0])
            )
            for _ in range(2)
        ]
        for thread in asking:
            thread.start()
        while b'"a":2' not in ask(address, "GET", "/health")[1]:
            time.sleep(0.005)
        connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)
        connection.request("POST", "/predict", image())
        refused = connection.getresponse()
        assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
        connection.close()
        for thread in asking:
            thread.join()
        assert answers == [200, 200]
        hook.remove()
        assert ask(address, "POST", "/predict", image())[0] == 200


def test_a_large_upload_is_told_so_before_its_connection_closes(server):
    status, said = ask(server, "POST", "/predict", bytes(17 << 20))
    assert (status, b"too_large" in said) == (413, True)


@pytest.mark.parametrize("host", ["evil.example", "ev{il}.example", "x/health?"])
def test_a_foreign_name_is_refused_on_this_machine(server, host):
    assert ask(server, "GET", "/models", Host=host)[0] == 403


def test_other_hosts_are_let_in_with_a_token_or_by_word(weights):
    with pytest.raises(VitrailError, match=r"--host 0.0.0.0 .*--token"):
        check_access("0.0.0.0", "", False)
    check_access("0.0.0.0", "secret", False)
    check_access("0.0.0.0", "", True)
    check_access("::1", "", False)
    with pytest.raises(VitrailError, match="printable ASCII"):
        check_access("127.0.0.1", "pass word", False)


@pytest.mark.parametrize("origin", ["example.org", "https://example.org/", "*", "null"])
def test_an_origin_that_no_browser_sends_is_refused(origin):
    usual = ["https://example.org", "http://localhost:3000", "http://[::1]:3000"]
    check_access("localhost", "", False, usual)
    with pytest.raises(VitrailError, match=r"--origin .*expected a form like"):
        check_access("localhost", "", False, [origin])


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("a", False),
    ],
)
def test_addresses_that_only_this_machine_reaches(host, expected):
    assert bool(local_names(host)) is expected


def test_a_port_in_use_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(
            FailureError, match=rf"cannot listen on 127.0.0.1:{port} \([\w ]+\); try another --port"
        ):
            bind("127.0.0.1", port)
    with pytest.raises(VitrailError, match="--port 99999: expected 0 to 65535"):
        bind("127.0.0.1", 99_999)


@pytest.mark.parametrize("missing", ["uvicorn", "prometheus_client"])
def test_without_the_extra_one_line_says_what_to_install(missing, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, missing, None)
    for name in ("api", "app", "connections", "metrics", "page"):
        monkeypatch.delitem(sys.modules, f"vitrail.serving.{name}", raising=False)
    with pytest.raises(SystemExit) as ended:
        main(["serve", "nothing"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "Error: vitrail serve needs the serving extra: pip install 'vitrail[serve]'\n"
    )
