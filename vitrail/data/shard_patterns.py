"""Which tar files a path, a pattern, an address or a folder stands for."""

import re
from collections.abc import Iterator
from pathlib import Path

from vitrail.data.folders import PARTS, has_pictures, sub_folders
from vitrail.data.shard_files import is_url, path_of
from vitrail.errors import VitrailError, did_you_mean

TARS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
"""What tar files are called; those that are compressed get a line of their own."""


def looks_like_shards(where: str) -> bool:
    """Whether a path, a pattern or an address is one of tar files."""
    return path_of(where).lower().endswith(TARS)


def holds_shards(folder: Path) -> bool:
    """Whether a folder is one of tar files, rather than of classes with a tar left among them."""
    if not addresses_of(str(folder))[1]:
        return False
    below = [folder / name for name in sub_folders(folder)]
    return not any(has_pictures(path) or sub_folders(path) for path in below)


def addresses_of(pattern: str) -> tuple[str, list[str]]:
    """The folder that is the same for all tar files that are meant, and these files, in order."""
    if not is_url(pattern) and (folder := Path(pattern)).is_dir():
        folders = [folder, *(folder / name for name in sub_folders(folder) if part_in(name))]
        return str(folder), sorted(str(path) for place in folders for path in place.glob("*.tar"))
    found = [address for choice in braces(pattern) for address in matches(choice)]
    for address in found:
        if not path_of(address).lower().endswith(".tar"):
            raise VitrailError(f"{address} is compressed; unpack it, or make a plain .tar of it")
    return re.split(r"[{*?\[]", pattern)[0].rpartition("/")[0], list(dict.fromkeys(found))


def part_in(text: str) -> str:
    """The part that a name speaks of, as `imagenet-train-0001.tar` does; empty where none."""
    words = re.split("[^a-z]+", path_of(text).lower())
    parts = {PARTS[word] for word in words if word in PARTS}
    return parts.pop() if len(parts) == 1 else ""


def braces(pattern: str) -> Iterator[str]:
    """`x-{000..009}.tar` and `{train,test}.tar` written out."""
    found = re.search(r"\{([^{}]*)\}", pattern)
    if found is None:
        yield pattern
        return
    run = re.fullmatch(r"(\d+)\.\.(\d+)", found[1])
    if run:
        first, last = run.groups()
        width = len(first) if first.startswith("0") else 0
        choices = [f"{number:0{width}}" for number in range(int(first), int(last) + 1)]
    else:
        choices = found[1].split(",")
    for choice in choices:
        yield from braces(pattern[: found.start()] + choice + pattern[found.end() :])


def matches(address: str) -> list[str]:
    """The files that an address with `*` or `?` stands for; each must exist."""
    if is_url(address):
        return [address]
    path = Path(address)
    found = [path] if path.is_file() else Path(path.anchor).glob(str(path.relative_to(path.anchor)))
    if not (found := sorted(map(str, found))):
        near = did_you_mean(path.name, (other.name for other in path.parent.glob("*.tar")))
        raise VitrailError(f"{address} does not exist{near or '; check the path'}")
    return found


def name_of(pattern: str) -> str:
    """What the data is called: the end of the path, without what varies."""
    path = path_of(pattern) if is_url(pattern) else str(Path(pattern).absolute())
    *_, folder, last = ["shards", *path.rstrip("/").split("/")]
    fixed = re.split(r"[{*?\[]", last.removesuffix(".tar"))[0].strip("-_. ")
    return fixed if fixed and fixed.lower() not in PARTS else folder
