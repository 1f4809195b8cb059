"""Files: written whole or not at all, and fetched over HTTP.

A download grows as `name.part`, and takes its name only once its length, and every hash that its
server or its name gives, agree. An interrupted one continues where it stopped, as long as the
server vouches that the file is still the same.
"""

import base64
import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException, HTTPMessage, HTTPResponse
from pathlib import Path
from typing import IO, Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, unquote, urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from safetensors import SafetensorError

from vitrail.console import Advance, byte_progress, byte_size, log_progress, say
from vitrail.errors import FailureError, VitrailError, one_line

CHUNK = 1 << 20
"""The most bytes read at once."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long a server may be silent, and how often a broken connection is taken up again."""

    stall: float = 30.0
    """Seconds without a byte after which a connection counts as broken."""
    tries: int = 4
    """Connections in a row that may bring nothing new."""
    pause: float = 1.0
    """Seconds to wait after the first broken connection; doubled after each further one."""


PATIENCE = Patience()


def cache() -> Path:
    """Where fetched files are kept: `$VITRAIL_CACHE`, else `~/.cache/vitrail`."""
    return Path(os.environ.get("VITRAIL_CACHE") or "~/.cache/vitrail").expanduser()


def fetch_file(url: str, folder: Path | None = None, patience: Patience = PATIENCE) -> Path:
    """The file behind an address, fetched unless `folder` (or the cache) has it already."""
    target = place(url, folder or cache())
    with on_disk(target):
        fetched = target.exists()
    if not fetched:
        download(url, target, patience)
    return target


def place(url: str, folder: Path) -> Path:
    """Where a file is kept: host and path count, since one bucket holds three `ViT-B_16.npz`."""
    parts = re.fullmatch(r"https?://([^/?#:]+(?::\d+)?)/([^?#]*[^/?#])(\?[^#]*)?(#.*)?", url)
    if not parts:
        raise VitrailError(
            f"cannot fetch '{url}'; expected https://host/…/file or hub:owner/repository"
        )
    host, path, query, _ = parts.groups()
    names = [host, *(unquote(name) for name in path.split("/"))]
    if query:
        names.insert(-1, hashlib.sha256(query.encode()).hexdigest()[:8])
    # No name may climb out of the folder or upset a file system.
    plain = (re.sub(r"[^\w.+=-]", "_", name).lstrip(".") for name in names)
    return folder.joinpath(*filter(None, plain))


def download(url: str, target: Path, patience: Patience) -> None:
    """Brings the file to its place in the cache, unless another process does so first."""
    with on_disk(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    with alone(target):
        if target.exists():
            return
        part = Part(target)
        with byte_progress(target.name) as advance:
            headers = complete(url, part, patience, advance)
        if damage := damage_of(part.path, hashes_of(target.name, headers)):
            part.drop()
            raise damaged(target.name, host_of(url), damage)
        part.finish()


def complete(url: str, part: "Part", patience: Patience, advance: Advance) -> Sequence[HTTPMessage]:
    """Connects until the part is whole; gives up after several connections that brought nothing."""
    start = most = part.size()
    idle = 0
    advance(start)
    while True:
        try:
            return connection(url, part, patience.stall, advance)
        except (OSError, HTTPException) as error:
            idle = 0 if part.size() > most else idle + 1
            most = max(most, part.size())
            # Who is offline should hear so at once; a network lost half-way may come back.
            if isinstance(error, URLError) and most == start:
                raise unreachable(url, part.target, error) from error
            if idle >= patience.tries:
                raise broken(url, part, error) from error
            time.sleep(patience.pause * 2**idle)


def connection(url: str, part: "Part", stall: float, advance: Advance) -> Sequence[HTTPMessage]:
    """One connection's worth of the part; raises unless that completes it."""
    redirects = Redirects()
    with connect(url, part, stall, redirects) as response:
        refuse_page(url, response)
        before = part.size()
        start, total = part.accept(response)
        advance(start - before, total)
        check_room(part, total)
        with on_disk(part.path), part.path.open("ab") as file:
            for chunk in chunks(response):
                file.write(chunk)
                advance(len(chunk), total)
    if total is not None and part.size() != total:
        raise ConnectionError(f"{part.size():,} of {total:,} bytes came")
    return (*redirects.headers, response.headers)


def connect(url: str, part: "Part", stall: float, redirects: "Redirects") -> HTTPResponse:
    """The server's answer; a status that is worth another try becomes a `ConnectionError`."""
    address = quote(url, safe="/:?#[]@!$&'()*+,;=%~")
    request = Request(address, headers={"User-Agent": "vitrail", **part.continuation()})
    try:
        return build_opener(redirects).open(request, timeout=stall)
    except HTTPError as error:
        error.close()
        if error.code == 416:  # the file has become shorter than the part
            part.drop()
        if error.code in {408, 416, 429} or error.code >= 500:
            raise ConnectionError(f"{error.code} {one_line(error.reason)}") from error
        raise VitrailError(
            f"{host_of(url)} answers {error.code} {one_line(error.reason)} for {url}; "
            "check the address"
        ) from error


def chunks(response: HTTPResponse) -> Iterator[bytes]:
    """The body as it comes. A broken connection is no `OSError` here: those are the disk's."""
    try:
        while chunk := response.read1(CHUNK):
            yield chunk
    except OSError as error:
        raise HTTPException(reason_of(error)) from error


class Redirects(HTTPRedirectHandler):
    """Follows redirects to nothing less safe, and keeps their headers: a hub puts hashes there."""

    def __init__(self) -> None:
        self.headers: list[HTTPMessage] = []

    def redirect_request(
        self, req: Request, fp: Any, code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> Request | None:
        if urlsplit(newurl).scheme not in {req.type, "https"}:
            fp.close()
            raise VitrailError(
                f"{req.full_url} leads to {newurl}; give an address that stays on https"
            )
        self.headers.append(headers)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class Part:
    """A file on its way: `name.part`, and in `name.part.etag` what its server calls the version."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.path = target.with_name(target.name + ".part")
        self.etag = target.with_name(target.name + ".part.etag")

    def size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def version(self) -> str:
        return self.etag.read_text() if self.etag.exists() else ""

    def continuation(self) -> dict[str, str]:
        """The headers that ask for the rest of this version, or for all of any other."""
        if not (self.size() and self.version()):
            return {}
        # The last byte is asked for again: past the end of a whole part there is nothing to send.
        return {"Range": f"bytes={self.size() - 1}-", "If-Range": self.version()}

    def accept(self, response: HTTPResponse) -> tuple[int, int | None]:
        """Keeps what the answer continues: where that begins, and the length of the whole file."""
        version = version_of(response.headers)
        length = response.headers.get("Content-Length")
        start, total = 0, int(length) if length else None
        if response.status == 206:
            found = re.match(r"bytes (\d+)-\d+/(\d+)", response.headers.get("Content-Range", ""))
            if not found or int(found[1]) != self.size() - 1 or version not in {"", self.version()}:
                self.drop()
                raise ConnectionError("it sent another part or version of the file")
            start, total = int(found[1]), int(found[2])
        with on_disk(self.path):
            self.path.touch()
            os.truncate(self.path, start)
            if start == 0:
                self.etag.write_text(version)
        return start, total

    def drop(self) -> None:
        self.path.unlink(missing_ok=True)
        self.etag.unlink(missing_ok=True)

    def finish(self) -> None:
        with on_disk(self.target):
            self.path.replace(self.target)
            self.etag.unlink(missing_ok=True)


def version_of(headers: HTTPMessage) -> str:
    """What `If-Range` may compare: a strong ETag, else the date. Without either: no resuming."""
    etag = headers.get("ETag", "")
    return etag if etag.startswith('"') else headers.get("Last-Modified", "")


@contextmanager
def alone(target: Path) -> Iterator[None]:
    """Lets one process at a time fetch a file.

    A lock, rather than a temporary file for each process: whoever comes second waits and finds the
    file, instead of fetching a gigabyte again; the part keeps a name that a later run can go on
    from; and the system frees the lock when its holder dies. The lock file is never deleted: a
    process waiting on the old one and a process creating a new one would both go ahead.
    """
    path = target.with_name(target.name + ".lock")
    with on_disk(path):
        file = path.open("ab")
    with file:
        with on_disk(path):
            wait_for(file, target.name)
        yield


def wait_for(file: IO[bytes], name: str) -> None:
    """Returns once this process has the lock."""
    if not locked(file):
        say(f"waiting for another process that is fetching {name}")
        while not locked(file):
            time.sleep(0.2)


def locked(file: IO[bytes]) -> bool:
    """Takes the lock, or says that another process has it."""
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


# Checks.


def hashes_of(name: str, headers: Sequence[HTTPMessage]) -> dict[str, str]:
    """What is known of a file's hashes; of a sha256, perhaps only its beginning.

    A plain ETag is not among them: servers make it up of dates, or of the parts of an upload.
    """
    known = {}
    # torch.hub's convention, `vit_b_16-c867db91.pth`; eight digits may also be a date.
    if named := re.search(r"-(?!20\d\d[01]\d[0-3]\d\.)([0-9a-f]{8,64})\.pth?$", name):
        known["sha256"] = named[1]
    for header in headers:
        if linked := re.search(r"\b[0-9a-f]{64}\b", header.get("X-Linked-Etag", "")):
            known["sha256"] = linked[0]
        for value in header.get_all("x-goog-hash", []):
            if md5 := re.search(r"\bmd5=([\w+/]+=*)", value):
                known["md5"] = base64.b64decode(md5[1]).hex()
    return known


def damage_of(path: Path, hashes: dict[str, str]) -> str:
    """Which hash of a file is not what it should be, and how; nothing if all are."""
    for algorithm, expected in hashes.items():
        digest = hashlib.new(algorithm, usedforsecurity=False)
        advance = log_progress(f"checking {path.name.removesuffix('.part')}", unit=byte_size)
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
                advance(len(chunk), path.stat().st_size)
        found = digest.hexdigest()
        if not found.startswith(expected):
            return f"{algorithm} {found[:8]}…, expected {expected[:8]}…"
    return ""


def refuse_page(url: str, response: HTTPResponse) -> None:
    """A page about a file is easily mistaken for the file, and would stay in the cache."""
    if response.headers.get_content_type() == "text/html":
        raise VitrailError(f"{url} is a web page, not a file; give the address of the file itself")


def check_room(part: Part, total: int | None) -> None:
    """Better no start than a full disk."""
    free = shutil.disk_usage(part.path.parent).free
    if total is not None and total - part.size() > free:
        raise FailureError(
            f"{part.target.name} needs {byte_size(total - part.size())} more and "
            f"{short(part.path.parent)} has {byte_size(free)} left; free some space, or let "
            "VITRAIL_CACHE name a folder on another disk"
        )


@contextmanager
def on_disk(path: Path) -> Iterator[None]:
    """Tells trouble with the disk from trouble with the network, which is worth another try."""
    try:
        yield
    except OSError as error:
        raise FailureError(
            f"cannot use {short(path)} ({reason_of(error)}); free some space, or let "
            "VITRAIL_CACHE name another folder"
        ) from error


# What a user reads.


def unreachable(url: str, target: Path, error: URLError) -> FailureError:
    """Offline, or the server is."""
    return FailureError(
        f"cannot reach {host_of(url)} ({reason_of(error)}) and {target.name} is not in "
        f"{short(target.parent)}; connect, or download it elsewhere and give its path"
    )


def broken(url: str, part: Part, error: Exception) -> FailureError:
    """The server answers, but the file never comes whole."""
    return FailureError(
        f"{host_of(url)} broke off {part.target.name} after {byte_size(part.size())} "
        f"({reason_of(error)}); run again to go on from there, or download it elsewhere and give "
        "its path"
    )


def damaged(name: str, origin: str, damage: str) -> FailureError:
    """The file came whole, but is not the one announced."""
    return FailureError(
        f"{name} from {origin} came damaged ({damage}) and was deleted; fetch it again"
    )


def reason_of(error: BaseException) -> str:
    """One line about an error, whichever library it comes from."""
    return one_line(error.reason if isinstance(error, URLError) else error)


def host_of(url: str) -> str:
    """The server of an address, and its port where one is given."""
    return urlsplit(url).netloc


def short(path: Path) -> str:
    """A path as a person writes it."""
    return f"~/{path.relative_to(Path.home())}" if path.is_relative_to(Path.home()) else str(path)


# On disk.


def replace_with(
    path: Path, save: Callable[[Path], object], *, previous: Path | None = None
) -> None:
    """Run `save` on a neighbour of `path`, then put that in its place.

    The file that was there is kept as `previous`, where that is given.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.touch()
        mode = part.stat().st_mode  # what the user's umask allows; safetensors keeps files private
        save(part)
        part.chmod(mode)
        with part.open("rb") as file:
            os.fsync(file.fileno())  # or a power cut could leave the name without the bytes
        if previous is not None and path.exists():
            path.replace(previous)
        part.replace(path)
    except (OSError, SafetensorError) as error:
        raise FailureError(
            f"cannot write {path} ({one_line(error)}); free some space or choose another place"
        ) from None
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def write_cached(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """A file of the cache; if it cannot be written, that only costs time."""

    def save(part: Path) -> None:
        with part.open("wb") as file:
            write(file)

    with suppress(FailureError):
        replace_with(path, save)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """An object as a JSON file; an empty one leaves none, not even an older one."""
    if not value:
        path.unlink(missing_ok=True)
    else:
        text = json.dumps(value, indent=2, ensure_ascii=False)
        replace_with(path, lambda part: part.write_text(text, "utf-8"))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty where the file is missing or broken."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file of JSON lines."""
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            found.append(json.loads(line))
        except (ValueError, RecursionError):
            continue
    return [value for value in found if isinstance(value, dict)]


def write_text(path: Path, text: str) -> None:
    """The whole file or none of it."""
    replace_with(path, lambda part: part.write_text(text, encoding="utf-8"))


def move(path: Path, target: Path) -> None:
    """Puts a file in the place of another."""
    try:
        path.replace(target)
    except OSError as error:
        raise FailureError(f"cannot write {target} ({one_line(error)})") from None


def append(path: Path, line: str) -> None:
    """One line at the end of a file."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError as error:
        raise FailureError(f"cannot write {path} ({one_line(error)})") from None


def make_folder(folder: Path) -> None:
    """The folder and those above it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FailureError(f"cannot create {folder} ({one_line(error)})") from None
