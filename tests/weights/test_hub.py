"""Fetching, against local servers that truncate, stall, corrupt, change their files or vanish."""

import base64
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from vitrail.errors import VitrailError
from vitrail.files import RetryPolicy, cache_folder, keep_compiled
from vitrail.weights.hub import fetch

QUICK = RetryPolicy(timeout=0.3, attempts=3, backoff=0.01)
BODY = bytes(range(256)) * 4000
OTHER = bytes(reversed(range(256))) * 3000
COMMIT = "c" * 40


@dataclass
class File:
    """What a path serves, and the faults of its first requests, one each."""

    body: bytes = BODY
    etag: str = '"v1"'
    headers: tuple[tuple[str, str], ...] = ()
    ranges: bool = True
    if_range: bool = True
    length: int | None = None
    faults: list[str] = field(default_factory=list)


class Site(ThreadingHTTPServer):
    """A server of files by path; it remembers every request, and the range each one asked for."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, File] = {}
        self.requests: list[tuple[str, str, str]] = []
        self.woken = threading.Event()
        self.host = f"127.0.0.1:{self.server_address[1]}"
        self.root = f"http://{self.host}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up is part of the game."""

    def ranges(self) -> list[str]:
        return [asked for _, _, asked in self.requests]


class Handler(BaseHTTPRequestHandler):
    """One request to a `Site`."""

    @property
    def site(self) -> Site:
        assert isinstance(self.server, Site)
        return self.server

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Silent."""

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        asked = self.headers.get("Range", "")
        self.site.requests.append((self.command, self.path, asked))
        file = self.site.files.get(self.path)
        if file is None:
            return self.missing()
        fault = file.faults.pop(0) if file.faults and body else ""
        if fault.isdigit():
            return self.send_error(int(fault))
        start = self.start(file, asked)
        if start >= len(file.body):
            return self.send_error(416)
        self.head(file, start)
        if body:
            self.send(file, file.body[start:], fault)
        return None

    def missing(self) -> None:
        """As the hub says it: the repository, the revision or the file is not there."""
        owner, _, rest = self.path[1:].partition("/resolve/")
        known = [path for path in self.site.files if path.startswith(f"/{owner}/resolve/")]
        revision = rest.partition("/")[0]
        code = "EntryNotFound" if any(f"/resolve/{revision}/" in path for path in known) else ""
        self.send_response(404, "Not Found")
        code = code or ("RevisionNotFound" if known else "RepoNotFound")
        self.send_header("X-Error-Code", code)
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()

    def start(self, file: File, asked: str) -> int:
        same = not file.if_range or self.headers.get("If-Range") == file.etag
        found = re.fullmatch(r"bytes=(\d+)-", asked)
        return int(found[1]) if found and file.ranges and same else 0

    def head(self, file: File, start: int) -> None:
        moved = dict(file.headers).get("Location")
        self.send_response(302 if moved else 206 if start else 200)
        if start:
            last, total = len(file.body) - 1, len(file.body)
            self.send_header("Content-Range", f"bytes {start}-{last}/{total}")
        self.send_header("Content-Length", str(file.length or len(file.body) - start))
        if file.etag:
            self.send_header("ETag", file.etag)
        for name, value in file.headers:
            self.send_header(name, value)
        self.end_headers()

    def send(self, file: File, body: bytes, fault: str) -> None:
        half = len(body) // 2
        if fault == "corrupt":
            body = body[:half] + b"?" + body[half + 1 :]
        if fault == "wait":
            self.site.woken.wait(20)
        self.wfile.write(body[:half] if fault in {"truncate", "stall", "change"} else body)
        if fault == "stall":
            self.wfile.flush()
            self.site.woken.wait(5)
        if fault == "change":
            file.body, file.etag = OTHER, '"v2"'


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("NO_PROXY", "*")


@pytest.fixture
def site() -> Iterator[Site]:
    with Site() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.woken.set()
        server.shutdown()
        thread.join()


def serve(site: Site, path: str = "/weights/model.npz", **settings: Any) -> str:
    site.files[path] = File(**settings)
    return site.root + path


def failure(source: str, folder: Path | None) -> str:
    """The message of the error, which must be a single line."""
    with pytest.raises(VitrailError) as caught:
        fetch(source, folder, QUICK)
    message = str(caught.value)
    assert "\n" not in message
    assert "; " in message, "it should say what to do"
    return message


def leftovers(folder: Path) -> set[str]:
    """Files in the cache apart from locks, which stay on purpose."""
    return {path.name for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"}


def leave_part(site: Site, folder: Path) -> None:
    """What a run leaves behind that is killed just before the end."""
    place = folder / site.host.replace(":", "_") / "weights"
    place.mkdir(parents=True)
    (place / "model.npz.part").write_bytes(BODY)
    (place / "model.npz.part.etag").write_text('"v1"')


def goog(body: bytes) -> tuple[tuple[str, str], ...]:
    md5 = base64.b64encode(hashlib.md5(body).digest()).decode()
    return (("x-goog-hash", "crc32c=AAAAAA=="), ("x-goog-hash", f"md5={md5}"))


# The web


def test_a_file_is_fetched_once_and_then_needs_no_network(site: Site, tmp_path: Path) -> None:
    url = serve(site)
    path = fetch(url, tmp_path, QUICK)
    assert path.name == "model.npz"
    assert path.read_bytes() == BODY
    assert fetch(url, tmp_path, QUICK) == path
    assert len(site.requests) == 1
    assert leftovers(tmp_path) == {"model.npz"}


def test_files_of_one_name_in_two_places_are_kept_apart(site: Site, tmp_path: Path) -> None:
    first = fetch(serve(site, "/a/ViT-B_16.npz"), tmp_path, QUICK)
    second = fetch(serve(site, "/a%2Bb/ViT-B_16.npz", body=OTHER), tmp_path, QUICK)
    assert first.read_bytes() == BODY
    assert second.read_bytes() == OTHER


@pytest.mark.parametrize("path", ["/%2e%2e/%2e%2e/x.npz", "/a%2F..%2F..%2F..%2Fx.npz", "/~.x"])
def test_an_address_cannot_climb_out_of_the_folder(site: Site, tmp_path: Path, path: str) -> None:
    found = fetch(serve(site, path), tmp_path / "cache", QUICK)
    assert found.resolve().is_relative_to(tmp_path / "cache")


def test_the_cache_is_where_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, site: Site, tmp_path: Path
) -> None:
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "elsewhere"))
    assert cache_folder() == tmp_path / "elsewhere"
    assert fetch(serve(site)).is_relative_to(tmp_path / "elsewhere")
    monkeypatch.delenv("VITRAIL_CACHE")
    assert cache_folder() == Path.home() / ".cache" / "vitrail"


def test_compiled_models_are_kept_in_the_cache_unless_the_user_chose_a_place(monkeypatch) -> None:
    for name in ("TORCHINDUCTOR_CACHE_DIR", "VITRAIL_CACHE"):
        monkeypatch.setenv(name, "elsewhere")
    keep_compiled()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "elsewhere"
    torchs_own = str(Path(tempfile.gettempdir()) / "torchinductor_me")
    for unset in ("", torchs_own):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", unset)
        keep_compiled()
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(Path("elsewhere") / "compiled")


@pytest.mark.parametrize("fault", ["truncate", "stall"])
def test_a_broken_connection_is_taken_up_where_it_broke(
    site: Site, tmp_path: Path, fault: str
) -> None:
    path = fetch(serve(site, faults=[fault]), tmp_path, QUICK)
    assert path.read_bytes() == BODY
    assert site.ranges() == ["", f"bytes={len(BODY) // 2 - 1}-"]


def test_a_connection_that_breaks_again_and_again_gets_there(site: Site, tmp_path: Path) -> None:
    path = fetch(serve(site, faults=["truncate"] * 8, headers=goog(BODY)), tmp_path, QUICK)
    assert path.read_bytes() == BODY
    assert len(site.requests) == 9


def test_a_later_run_goes_on_from_an_earlier_one(site: Site, tmp_path: Path) -> None:
    url = serve(site, faults=["truncate", "503", "503", "503"])
    message = failure(url, tmp_path)
    assert "503 Service Unavailable" in message
    assert "run again" in message
    assert "model.npz.part" in leftovers(tmp_path)
    assert fetch(url, tmp_path, QUICK).read_bytes() == BODY
    assert site.ranges()[-1] == f"bytes={len(BODY) // 2 - 1}-"
    assert leftovers(tmp_path) == {"model.npz"}


def test_a_part_that_was_already_whole_is_finished(site: Site, tmp_path: Path) -> None:
    url = serve(site, headers=goog(BODY))
    leave_part(site, tmp_path)
    assert fetch(url, tmp_path, QUICK).read_bytes() == BODY
    assert site.ranges() == [f"bytes={len(BODY) - 1}-"]


def test_a_part_longer_than_the_file_is_dropped(site: Site, tmp_path: Path) -> None:
    url = serve(site, body=OTHER, if_range=False)
    leave_part(site, tmp_path)
    assert fetch(url, tmp_path, QUICK).read_bytes() == OTHER
    assert site.ranges() == [f"bytes={len(BODY) - 1}-", ""]


def test_a_server_without_ranges_starts_again(site: Site, tmp_path: Path) -> None:
    path = fetch(serve(site, ranges=False, faults=["truncate"]), tmp_path, QUICK)
    assert path.read_bytes() == BODY


@pytest.mark.parametrize("etag", ["", 'W/"weak"'])
def test_a_server_that_names_no_exact_version_is_not_resumed(
    site: Site, tmp_path: Path, etag: str
) -> None:
    path = fetch(serve(site, etag=etag, faults=["truncate"]), tmp_path, QUICK)
    assert path.read_bytes() == BODY
    assert site.ranges() == ["", ""]


@pytest.mark.parametrize("if_range", [True, False])
def test_a_file_that_changes_half_way_is_never_patched_together(
    site: Site, tmp_path: Path, if_range: bool
) -> None:
    path = fetch(serve(site, if_range=if_range, faults=["change"]), tmp_path, QUICK)
    assert path.read_bytes() == OTHER


def test_a_file_that_never_comes_whole_is_reported(site: Site, tmp_path: Path) -> None:
    message = failure(serve(site, ranges=False, faults=["truncate"] * 9), tmp_path)
    assert message.startswith(f"the download of model.npz from {site.host} stopped after 0.5 MB")
    assert "512,000 of 1,024,000 bytes" in message
    assert "model.npz" not in leftovers(tmp_path)


def test_a_server_that_only_stalls_is_reported(site: Site, tmp_path: Path) -> None:
    message = failure(serve(site, ranges=False, faults=["stall"] * 9), tmp_path)
    assert "timed out" in message


def test_a_damaged_file_is_deleted_and_can_be_fetched_again(site: Site, tmp_path: Path) -> None:
    url = serve(site, headers=goog(BODY), faults=["corrupt"])
    message = failure(url, tmp_path)
    assert message.startswith(f"model.npz from {site.host} was damaged (md5 ")
    assert not leftovers(tmp_path)
    assert fetch(url, tmp_path, QUICK).read_bytes() == BODY


def test_damage_in_one_half_of_a_resumed_file_is_found(site: Site, tmp_path: Path) -> None:
    url = serve(site, headers=goog(BODY), faults=["truncate", "corrupt"])
    assert "was damaged" in failure(url, tmp_path)


def test_an_etag_that_looks_like_an_md5_is_not_taken_for_one(site: Site, tmp_path: Path) -> None:
    url = serve(site, etag=f'"{"0" * 32}"')
    assert fetch(url, tmp_path, QUICK).read_bytes() == BODY


def test_a_hash_in_the_name_is_checked(site: Site, tmp_path: Path) -> None:
    prefix = hashlib.sha256(BODY).hexdigest()[:8]
    fetch(serve(site, f"/vit_b_16-{prefix}.pth"), tmp_path, QUICK)
    message = failure(serve(site, "/vit_b_16-00000000.pth"), tmp_path)
    assert f"(sha256 {prefix}…, expected 00000000…)" in message


def test_a_date_in_the_name_is_no_hash(site: Site, tmp_path: Path) -> None:
    assert fetch(serve(site, "/model-20240131.pth"), tmp_path, QUICK).read_bytes() == BODY


def test_a_hash_given_with_a_redirect_is_checked(site: Site, tmp_path: Path) -> None:
    end = serve(site, "/cdn/blob")
    sha256 = hashlib.sha256(BODY).hexdigest()
    for name, linked in (("good", sha256), ("bad", "0" * 64)):
        headers = (("Location", end), ("X-Linked-Etag", f'"{linked}"'))
        serve(site, f"/{name}.npz", headers=headers, length=1)
    assert fetch(f"{site.root}/good.npz", tmp_path, QUICK).read_bytes() == BODY
    assert "was damaged (sha256" in failure(f"{site.root}/bad.npz", tmp_path)


@pytest.mark.parametrize("end", ["file:///etc/passwd", "ftp://127.0.0.1/model.npz"])
def test_a_redirect_away_from_the_web_is_not_followed(site: Site, tmp_path: Path, end: str) -> None:
    message = failure(serve(site, headers=(("Location", end),), length=1), tmp_path)
    assert end in message
    assert not leftovers(tmp_path)


def test_a_missing_file_is_reported_at_once(site: Site, tmp_path: Path) -> None:
    message = failure(f"{site.root}/nothing.npz", tmp_path)
    assert message == (
        f"{site.host} returned 404 Not Found for {site.root}/nothing.npz; check the address"
    )
    assert len(site.requests) == 1


def test_a_web_page_is_not_kept_as_weights(site: Site, tmp_path: Path) -> None:
    url = serve(site, headers=(("Content-Type", "text/html; charset=utf-8"),))
    assert "is a web page, not a file" in failure(url, tmp_path)
    assert not leftovers(tmp_path)


def test_a_file_larger_than_the_disk_is_not_begun(site: Site, tmp_path: Path) -> None:
    message = failure(serve(site, length=10**18), tmp_path)
    assert message.startswith("model.npz needs 1000000000.0 GB more and ")
    assert (tmp_path / site.host.replace(":", "_") / "weights/model.npz.part").stat().st_size == 0


def test_being_offline_is_said_at_once_and_plainly(tmp_path: Path) -> None:
    with Site() as gone:
        url = f"{gone.root}/ViT-B_16.npz"
    begun = time.monotonic()
    message = failure(url, tmp_path)
    assert re.fullmatch(
        r"cannot reach 127\.0\.0\.1:\d+ \(Connection refused\) and ViT-B_16\.npz is not in "
        r"\S+; connect, or download it elsewhere and give its path",
        message,
    )
    assert time.monotonic() - begun < 2


def test_a_cache_that_cannot_be_written_is_reported(site: Site, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    message = failure(serve(site), tmp_path / "file")
    assert message.startswith("cannot use ")
    assert "VITRAIL_CACHE" in message


@pytest.mark.parametrize(
    "source",
    [
        "ftp://host/model.npz",
        "file:///etc/passwd",
        "https://host",
        "https://host/folder/",
        "https://host:port/model.npz",
        "B/16",
        "hub:model",
        "hub:owner/model/file",
        "hub:owner/model@",
    ],
)
def test_what_cannot_be_fetched_is_refused(source: str, tmp_path: Path) -> None:
    assert failure(source, tmp_path).startswith(f"cannot fetch '{source}'; expected ")


def test_a_second_process_waits_and_finds_the_file(site: Site, tmp_path: Path) -> None:
    url = serve(site, faults=["wait"])
    code = (
        "import sys, pathlib; from vitrail.weights.hub import fetch; "
        "sys.stdout.write(str(fetch(sys.argv[1], pathlib.Path(sys.argv[2]))))"
    )

    def start() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code, url, str(tmp_path)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    with start() as first:
        while not site.requests:
            time.sleep(0.01)
        with start() as second:
            assert second.stderr is not None
            assert second.stderr.readline().startswith("waiting for another process")
            site.woken.set()
            paths = {process.communicate(timeout=20)[0] for process in (first, second)}
    assert Path(paths.pop()).read_bytes() == BODY
    assert not paths
    assert len(site.requests) == 1


# The hub


@pytest.fixture
def hub(site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setenv("HF_ENDPOINT", site.root)
    return site


def put(hub: Site, name: str, body: bytes, *, large: bool = False, **settings: Any) -> None:
    """A file of the repository `owner/model`; large ones carry their sha256, as on the hub."""
    headers: list[tuple[str, str]] = [("X-Repo-Commit", COMMIT)]
    if large:
        headers.append(("X-Linked-Etag", f'"{hashlib.sha256(body).hexdigest()}"'))
    etag = f'"{hashlib.sha1(body).hexdigest()}"'
    path = f"/owner/model/resolve/main/{name}"
    hub.files[path] = File(body, etag=etag, headers=tuple(headers), **settings)


def test_a_repository_becomes_a_folder_that_needs_no_network_again(
    hub: Site, tmp_path: Path
) -> None:
    put(hub, "config.json", b"{}")
    put(hub, "preprocessor_config.json", b"[]")
    put(hub, "model.safetensors", BODY, large=True)
    put(hub, "pytorch_model.bin", OTHER, large=True)
    folder = fetch("hub:owner/model", tmp_path)
    assert (folder / "model.safetensors").read_bytes() == BODY
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "model.safetensors",
        "preprocessor_config.json",
    }
    hub.requests.clear()
    assert fetch("hub:owner/model", tmp_path) == folder
    assert not hub.requests


def test_pytorch_weights_serve_where_there_are_no_safetensors(hub: Site, tmp_path: Path) -> None:
    put(hub, "config.json", b"{}")
    put(hub, "pytorch_model.bin", BODY, large=True)
    folder = fetch("hub:owner/model@main", tmp_path)
    assert {path.name for path in folder.iterdir()} == {"config.json", "pytorch_model.bin"}
    assert fetch("hub:owner/model", tmp_path) == folder


def test_damaged_weights_of_a_repository_are_deleted_and_fetched_again(
    hub: Site, tmp_path: Path
) -> None:
    put(hub, "config.json", b"{}")
    put(hub, "model.safetensors", BODY, large=True, faults=["corrupt"])
    message = failure("hub:owner/model", tmp_path)
    assert message.startswith("model.safetensors from owner/model was damaged (sha256 ")
    assert not [path for path in tmp_path.rglob("blobs/*") if path.stat().st_size]
    folder = fetch("hub:owner/model", tmp_path)
    assert (folder / "model.safetensors").read_bytes() == BODY


def test_weights_without_a_configuration_are_refused(hub: Site, tmp_path: Path) -> None:
    put(hub, "model.safetensors", BODY, large=True)
    assert "has no config.json" in failure("hub:owner/model", tmp_path)


def test_a_repository_without_weights_is_refused(hub: Site, tmp_path: Path) -> None:
    put(hub, "config.json", b"{}")
    message = failure("hub:owner/model", tmp_path)
    assert "has no model.safetensors or pytorch_model.bin" in message


def test_an_unknown_repository_or_revision_is_named(hub: Site, tmp_path: Path) -> None:
    put(hub, "config.json", b"{}")
    assert f"{hub.host} has no repository owner/nothing" in failure("hub:owner/nothing", tmp_path)
    assert "has no revision 'old'" in failure("hub:owner/model@old", tmp_path)


def test_an_unreachable_hub_is_said_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with Site() as gone:
        monkeypatch.setenv("HF_ENDPOINT", gone.root)
    begun = time.monotonic()
    message = failure("hub:owner/model", tmp_path)
    assert message.startswith(f"cannot fetch model.safetensors of owner/model from {gone.host} (")
    assert "go online, or download the repository" in message
    assert time.monotonic() - begun < 5


def test_without_huggingface_hub_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(VitrailError) as caught:
        fetch("hub:owner/model", tmp_path)
    assert str(caught.value) == ("hub:owner/model needs the hub extra: pip install 'vitrail[hub]'")
