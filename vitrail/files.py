"""Files: written whole or not at all, and downloaded over HTTP.

A download grows as `name.part`, and takes its name only once its length and every hash that its
server or its name gives agree. An interrupted one continues where it stopped, as long as the
server confirms that the file is still the same.
"""

import base64
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
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

_CHUNK = 1 << 20


# Reading and writing


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turn trouble with the disk into one line about the file."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        message = f"cannot write {path} ({one_line(error)})"
        raise FailureError(f"{message}; free some space or choose another place") from None


def atomic_write(
    path: Path, save: Callable[[Path], object], *, previous: Path | None = None
) -> None:
    """Let `save` write a temporary file beside `path`, then rename it to `path`.

    The file that was there is kept as `previous`, if given.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            part.touch()
            mode = part.stat().st_mode  # what the umask allows; safetensors makes files private
            save(part)
            part.chmod(mode)
            with part.open("rb") as file:
                os.fsync(file.fileno())  # or a power cut could leave the name without the bytes
            if previous is not None and path.exists():
                path.replace(previous)
            part.replace(path)
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    atomic_write(path, lambda part: part.write_text(text, encoding="utf-8"))


def write_bytes(
    path: Path, write: Callable[[IO[bytes]], object], *, previous: Path | None = None
) -> None:
    """`atomic_write` by a function that takes an open file: to a path, numpy would add a suffix."""

    def save(part: Path) -> None:
        with part.open("wb") as file:
            write(file)

    atomic_write(path, save, previous=previous)


def write_cached(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file of the cache; a failure only costs time."""
    with suppress(FailureError):
        write_bytes(path, write)


@dataclass(frozen=True)
class BoundedFolder:
    """A folder of the cache in which the least recently used files make room for new ones.

    A process that has a deleted file open can still read it.
    """

    folder: Path
    variable: str
    """The environment variable that sets the limit, in gigabytes."""
    gigabytes: int
    """The limit in gigabytes if the variable is not set."""
    share: float
    """The largest share of the disk space free without the folder that it may take in that case."""

    def limit(self) -> int:
        """The most bytes that the files may take."""
        there = next(path for path in (self.folder, *self.folder.parents) if path.exists())
        without = sum(size for _, size, _ in self._files()) + shutil.disk_usage(there).free
        setting = os.environ.get(self.variable)
        if setting is None:
            return int(min(self.gigabytes * 1e9, self.share * without))
        try:
            return int(min(float(setting) * 1e9, without))
        except ValueError:
            raise VitrailError(
                f"{self.variable}={setting}: expected gigabytes, such as {self.gigabytes}"
            ) from None

    def make_room(self, size: int = 0, keep: Collection[Path] = ()) -> None:
        """Delete files until `size` more bytes fit within the limit, but never those to `keep`."""
        files, limit = self._files(), self.limit()
        total = size + sum(taken for _, taken, _ in files)
        for _, taken, path in sorted(files):
            if total <= limit:
                return
            if path not in keep:
                with suppress(OSError):
                    path.unlink()
                total -= taken

    def _files(self) -> list[tuple[float, int, Path]]:
        """When each file was last used, its size and its path; nothing that is being written."""
        files = []
        for path in self.folder.rglob("*"):
            with suppress(OSError):  # deleted by another process
                status = path.stat()
                if path.is_file() and path.suffix not in (".lock", ".part", ".etag"):
                    files.append((status.st_mtime, status.st_size, path))
        return files


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write an object as JSON; an empty one deletes the file."""
    if value:
        write_text(path, json.dumps(value, indent=2, ensure_ascii=False))
    else:
        path.unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty if the file is missing or broken."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON Lines file, without lines that are broken."""
    values = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError, RecursionError):
            values.append(json.loads(line))
    return [value for value in values if isinstance(value, dict)]


def append_line(path: Path, line: str) -> None:
    with write_errors(path), path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def move(path: Path, target: Path) -> None:
    with write_errors(target):
        path.replace(target)


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FailureError(f"cannot create {folder} ({one_line(error)})") from None


# Downloads


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """How long a server may be silent, and how often to connect again."""

    timeout: float = 30.0
    """Seconds without a byte after which a connection counts as broken."""
    attempts: int = 4
    """Connections in a row that may bring nothing new."""
    backoff: float = 1.0
    """Seconds to wait after the first broken connection; doubled after each further one."""


RETRIES = RetryPolicy()


def cache_folder() -> Path:
    """Where downloads are stored: `$VITRAIL_CACHE`, else `~/.cache/vitrail`."""
    return Path(os.environ.get("VITRAIL_CACHE") or "~/.cache/vitrail").expanduser()


def keep_compiled() -> None:
    """Have torch.compile keep graphs, kernels and tuning results for the next run; its own place is
    a temporary folder. The user's choice comes first."""
    chosen = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    # torch itself sets the variable as soon as its compiler is imported.
    if not chosen or chosen.startswith(str(Path(tempfile.gettempdir()) / "torchinductor_")):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache_folder() / "compiled")


def fetch_file(url: str, folder: Path | None = None, retries: RetryPolicy = RETRIES) -> Path:
    """The file behind a URL, downloaded unless `folder` (by default the cache) has it already."""
    target = cached_path(url, folder or cache_folder())
    with disk_errors(target):
        if target.exists():
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
    with download_lock(target):
        if not target.exists():  # another process may have been faster
            _Download(url, target, retries).run()
    return target


def cached_path(url: str, folder: Path) -> Path:
    """Where a download is stored, by host and path: one bucket has three `ViT-B_16.npz`."""
    parts = re.fullmatch(r"https?://([^/?#:]+(?::\d+)?)/([^?#]*[^/?#])(\?[^#]*)?(#.*)?", url)
    if not parts:
        raise VitrailError(
            f"cannot fetch '{url}'; expected https://host/…/file or hub:owner/repository"
        )
    host, path, query, _ = parts.groups()
    names = [host, *(unquote(name) for name in path.split("/"))]
    if query:
        names.insert(-1, hashlib.sha256(query.encode()).hexdigest()[:8])
    # No name may leave the folder or be invalid on some file system.
    plain = (re.sub(r"[^\w.+=-]", "_", name).lstrip(".") for name in names)
    return folder.joinpath(*filter(None, plain))


class _Download:
    """A file being downloaded: `name.part` has its bytes, `name.part.etag` the server's version."""

    def __init__(self, url: str, target: Path, retries: RetryPolicy) -> None:
        self.url, self.target, self.retries = url, target, retries
        self.part = target.with_name(target.name + ".part")
        self.etag = target.with_name(target.name + ".part.etag")

    def run(self) -> None:
        with byte_progress(self.target.name) as advance:
            headers = self._complete(advance)
        if mismatch := hash_mismatch(self.part, _known_hashes(self.target.name, headers)):
            self._discard()
            raise damage_error(self.target.name, host_of(self.url), mismatch)
        with disk_errors(self.target):
            self.part.replace(self.target)
            self.etag.unlink(missing_ok=True)

    def _complete(self, advance: Advance) -> Sequence[HTTPMessage]:
        """Connect until the part is complete, or until several connections brought nothing new."""
        start = most = self._size()
        idle = 0
        advance(start)
        while True:
            try:
                return self._continue(advance)
            except (OSError, HTTPException) as error:
                idle = 0 if self._size() > most else idle + 1
                most = max(most, self._size())
                # Being offline is reported at once; a network lost half-way may come back.
                if isinstance(error, URLError) and most == start:
                    raise FailureError(
                        f"cannot reach {host_of(self.url)} ({failure_reason(error)}) and "
                        f"{self.target.name} is not in {_short(self.target.parent)}; connect, or "
                        "download it elsewhere and give its path"
                    ) from error
                if idle >= self.retries.attempts:
                    raise FailureError(
                        f"the download of {self.target.name} from {host_of(self.url)} stopped "
                        f"after {byte_size(self._size())} ({failure_reason(error)}); run again to "
                        "continue, or download it elsewhere and give its path"
                    ) from error
                time.sleep(self.retries.backoff * 2**idle)

    def _continue(self, advance: Advance) -> Sequence[HTTPMessage]:
        """One connection's worth of bytes; raises unless they complete the part."""
        redirects = _Redirects()
        with self._connect(redirects) as response:
            if response.headers.get_content_type() == "text/html":
                raise VitrailError(
                    f"{self.url} is a web page, not a file; give the address of the file itself"
                )
            before = self._size()
            start, total = self._accept(response)
            advance(start - before, total)
            self._check_disk_space(total)
            with disk_errors(self.part), self.part.open("ab") as file:
                for chunk in _chunks(response):
                    file.write(chunk)
                    advance(len(chunk), total)
        if total is not None and self._size() != total:
            raise ConnectionError(f"only {self._size():,} of {total:,} bytes were received")
        return (*redirects.headers, response.headers)

    def _connect(self, redirects: "_Redirects") -> HTTPResponse:
        """The server's response; a status worth another try becomes a `ConnectionError`."""
        headers = {"User-Agent": "vitrail"}
        if self._size() and self._version():
            # The last byte once more: after the end of a complete part there is nothing to send.
            headers |= {"Range": f"bytes={self._size() - 1}-", "If-Range": self._version()}
        request = Request(quote(self.url, safe="/:?#[]@!$&'()*+,;=%~"), headers=headers)
        try:
            return build_opener(redirects).open(request, timeout=self.retries.timeout)
        except HTTPError as error:
            error.close()
            if error.code == 416:  # the file has become shorter than the part
                self._discard()
            if error.code in {408, 416, 429} or error.code >= 500:
                raise ConnectionError(f"{error.code} {one_line(error.reason)}") from error
            raise VitrailError(
                f"{host_of(self.url)} returned {error.code} {one_line(error.reason)} for "
                f"{self.url}; check the address"
            ) from error

    def _accept(self, response: HTTPResponse) -> tuple[int, int | None]:
        """Cut the part to what the response continues: its start, and the whole file's length."""
        headers = response.headers
        # What If-Range can compare: a strong ETag, else the date. With neither, no resuming.
        etag = headers.get("ETag", "")
        version = etag if etag.startswith('"') else headers.get("Last-Modified", "")
        length = headers.get("Content-Length")
        start, total = 0, int(length) if length else None
        if response.status == 206:
            sent = re.match(r"bytes (\d+)-\d+/(\d+)", headers.get("Content-Range", ""))
            same = version in {"", self._version()}
            if not sent or int(sent[1]) != self._size() - 1 or not same:
                self._discard()
                raise ConnectionError("the server sent another part or version of the file")
            start, total = int(sent[1]), int(sent[2])
        with disk_errors(self.part):
            self.part.touch()
            os.truncate(self.part, start)
            if start == 0:
                self.etag.write_text(version)
        return start, total

    def _check_disk_space(self, total: int | None) -> None:
        free = shutil.disk_usage(self.part.parent).free
        if total is not None and total - self._size() > free:
            raise FailureError(
                f"{self.target.name} needs {byte_size(total - self._size())} more and "
                f"{_short(self.part.parent)} has {byte_size(free)} left; free some space, or set "
                "VITRAIL_CACHE to a folder on another disk"
            )

    def _size(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0

    def _version(self) -> str:
        return self.etag.read_text() if self.etag.exists() else ""

    def _discard(self) -> None:
        self.part.unlink(missing_ok=True)
        self.etag.unlink(missing_ok=True)


class _Redirects(HTTPRedirectHandler):
    """Follows redirects to nothing less safe, and keeps their headers: a hub puts hashes there."""

    def __init__(self) -> None:
        self.headers: list[HTTPMessage] = []

    def redirect_request(
        self, req: Request, fp: Any, code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> Request | None:
        if urlsplit(newurl).scheme not in {req.type, "https"}:
            fp.close()
            raise VitrailError(
                f"{req.full_url} redirects to {newurl}; give an address that stays on https"
            )
        self.headers.append(headers)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _chunks(response: HTTPResponse) -> Iterator[bytes]:
    """The body as it arrives; a broken connection is no `OSError`, since those are the disk's."""
    try:
        while chunk := response.read1(_CHUNK):
            yield chunk
    except OSError as error:
        raise HTTPException(failure_reason(error)) from error


@contextmanager
def download_lock(target: Path) -> Iterator[None]:
    """Let one process at a time download a file; others wait, and then find it.

    The lock file is never deleted: a process waiting on the old one and a process creating a new
    one would both go ahead. The system releases the lock when its holder dies.
    """
    path = target.with_name(target.name + ".lock")
    with disk_errors(path):
        file = path.open("ab")
    with file:
        with disk_errors(path):
            if not _try_lock(file):
                say(f"waiting for another process that is fetching {target.name}")
                while not _try_lock(file):
                    time.sleep(0.2)
        yield


def _try_lock(file: IO[bytes]) -> bool:
    """Take the lock unless another process has it."""
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


def _known_hashes(name: str, headers: Sequence[HTTPMessage]) -> dict[str, str]:
    """The hashes that a file should have; of a sha256, perhaps only the first digits.

    A plain ETag is not among them: servers derive it from dates, or from the parts of an upload.
    """
    hashes = {}
    # torch.hub's convention, `vit_b_16-c867db91.pth`; eight digits may also be a date.
    if named := re.search(r"-(?!20\d\d[01]\d[0-3]\d\.)([0-9a-f]{8,64})\.pth?$", name):
        hashes["sha256"] = named[1]
    for header in headers:
        if linked := re.search(r"\b[0-9a-f]{64}\b", header.get("X-Linked-Etag", "")):
            hashes["sha256"] = linked[0]
        for value in header.get_all("x-goog-hash", []):
            if md5 := re.search(r"\bmd5=([\w+/]+=*)", value):
                hashes["md5"] = base64.b64decode(md5[1]).hex()
    return hashes


def hash_mismatch(path: Path, hashes: dict[str, str]) -> str:
    """The first hash of a file that is not as expected, in words; empty if all are."""
    for algorithm, expected in hashes.items():
        digest = hashlib.new(algorithm, usedforsecurity=False)
        advance = log_progress(f"checking {path.name.removesuffix('.part')}", unit=byte_size)
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                advance(len(chunk), path.stat().st_size)
        actual = digest.hexdigest()
        if not actual.startswith(expected):
            return f"{algorithm} {actual[:8]}…, expected {expected[:8]}…"
    return ""


def damage_error(name: str, origin: str, mismatch: str) -> FailureError:
    return FailureError(
        f"{name} from {origin} was damaged ({mismatch}) and has been deleted; fetch it again"
    )


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Tell trouble with the disk from trouble with the network, which is worth another try."""
    try:
        yield
    except OSError as error:
        raise FailureError(
            f"cannot use {_short(path)} ({failure_reason(error)}); free some space, or set "
            "VITRAIL_CACHE to another folder"
        ) from error


def failure_reason(error: BaseException) -> str:
    """One line about an error of any library."""
    return one_line(error.reason if isinstance(error, URLError) else error)


def host_of(url: str) -> str:
    """Host and port."""
    return urlsplit(url).netloc


def _short(path: Path) -> str:
    return f"~/{path.relative_to(Path.home())}" if path.is_relative_to(Path.home()) else str(path)
