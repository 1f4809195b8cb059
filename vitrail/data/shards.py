"""Images in tar files, in the WebDataset format or in class folders inside the tar.

Files that share a path up to the first dot of the last name are one sample: an image, and a `.cls`
or `.json` with its class. If no tar has any of these, the folder of an image is its class, and a
folder called train, val or test above that its split.
"""

import hashlib
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
from jaxtyping import Int, Int64
from PIL import Image

from vitrail.console import say
from vitrail.data.dataset import IndexedSource, Splits, listed, sort_classes
from vitrail.data.decode import Pixels, decode, decode_pixels, refuse_large
from vitrail.data.folder import NO_CLASS, PARTS, has_images, sub_folders
from vitrail.data.tars import (
    CLASS_LISTS,
    Index,
    Shard,
    build_index,
    fetched,
    is_url,
    on_file,
    path_of,
)
from vitrail.errors import FailureError, VitrailError, did_you_mean
from vitrail.files import cache_folder, cached_path, fetch_file

_FORMAT = 1
"""Increased when the index changes, so that old ones are not read."""
_MOST_CLASSES = 1_000_000
_TARS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
"""Suffixes of tar files; compressed ones get an error of their own."""


@dataclass(frozen=True)
class ShardSource(IndexedSource):
    """Images in tar files, read by their offset."""

    shards: tuple[Shard, ...]
    shard_numbers: Int[np.ndarray, " n"]
    """The number of each image's shard."""
    offsets: Int64[np.ndarray, " n"]
    sizes: Int64[np.ndarray, " n"]

    @property
    def blocks(self) -> Int[np.ndarray, " n"]:
        return self.shard_numbers

    def image(self, index: int) -> Image.Image:
        return decode(BytesIO(self.content(index)), self._title(index))

    def rgb(self, index: int, side: int) -> Pixels:
        return decode_pixels(BytesIO(self.content(index)), self._title(index), side)

    def content(self, index: int) -> bytes:
        """The bytes of the image file."""
        refuse_large(self._title(index), int(self.sizes[index]))
        shard = self.shards[self.blocks[index]]
        return shard.read(int(self.offsets[index]), int(self.sizes[index]))

    def _title(self, index: int) -> str:
        return f"{self.names[index]} in {self.shards[self.blocks[index]].name}"


def open_shards(pattern: str, unlabeled: bool = False) -> Splits:
    """The data in tar files, given by a path, a pattern, a URL or a folder."""
    pattern = pattern if is_url(pattern) else str(Path(pattern))
    base, addresses = _addresses_of(pattern)
    indices = [_index_of(address) for address in addresses]
    for address, index in zip(addresses, indices, strict=True):
        if index.damage:
            n = len(index.offsets)
            say(f"{address} is damaged after {n:,} images ({index.damage}); skipping the rest")
    parts = [_part_in(address.removeprefix(base)) or "train" for address in addresses]
    return Splits(name=_name_of(pattern), **_interpret(addresses, indices, parts, unlabeled))


def _index_of(address: str) -> Index:
    """The index of a tar file, from the cache or built now."""
    key = address if is_url(address) else on_file(address, _version)
    digest = hashlib.sha256(f"{_FORMAT}\0{key}".encode("utf-8", "surrogateescape")).hexdigest()
    path = cache_folder() / "shards" / "index" / f"{digest[:32]}.npz"
    index = Index.load(path)
    if index is None or (is_url(address) and index.is_outdated(fetched(address))):
        index = on_file(address, lambda file: build_index(file, address))
        index.save(path)
    return index


def _version(path: Path) -> str:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # opening a pipe may block forever
        raise VitrailError(f"{path} is not a regular file; expected a tar file")
    return f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}"


# Which tar files.


def looks_like_shards(source: str) -> bool:
    """Whether a path, a pattern or a URL means tar files."""
    return path_of(source).lower().endswith(_TARS)


def has_shards(folder: Path) -> bool:
    """Whether a folder has tar files, and not class folders with a tar left among them."""
    if not _addresses_of(str(folder))[1]:
        return False
    below = [folder / name for name in sub_folders(folder)]
    return not any(has_images(path) or sub_folders(path) for path in below)


def _addresses_of(pattern: str) -> tuple[str, list[str]]:
    """The common folder of the tar files, and their sorted paths or URLs."""
    if not is_url(pattern) and (folder := Path(pattern)).is_dir():
        folders = [folder, *(folder / name for name in sub_folders(folder) if _part_in(name))]
        return str(folder), sorted(str(path) for place in folders for path in place.glob("*.tar"))
    addresses = [address for choice in _braces(pattern) for address in _matches(choice)]
    for address in addresses:
        if not path_of(address).lower().endswith(".tar"):
            raise VitrailError(f"{address} is compressed; decompress it to a plain .tar")
    return re.split(r"[{*?\[]", pattern)[0].rpartition("/")[0], list(dict.fromkeys(addresses))


def _part_in(text: str) -> str:
    """The split in a name such as `imagenet-train-0001.tar`; empty if there is none."""
    words = re.split("[^a-z]+", path_of(text).lower())
    parts = {PARTS[word] for word in words if word in PARTS}
    return parts.pop() if len(parts) == 1 else ""


def _braces(pattern: str) -> Iterator[str]:
    """Expands `x-{000..009}.tar` and `{train,test}.tar`."""
    group = re.search(r"\{([^{}]*)\}", pattern)
    if group is None:
        yield pattern
        return
    run = re.fullmatch(r"(\d+)\.\.(\d+)", group[1])
    if run:
        first, last = run.groups()
        width = len(first) if first.startswith("0") else 0
        choices = [f"{number:0{width}}" for number in range(int(first), int(last) + 1)]
    else:
        choices = group[1].split(",")
    for choice in choices:
        yield from _braces(pattern[: group.start()] + choice + pattern[group.end() :])


def _matches(address: str) -> list[str]:
    """The files that match a path with `*` or `?`; at least one must exist."""
    if is_url(address):
        return [address]
    path = Path(address)
    paths = [path] if path.is_file() else Path(path.anchor).glob(str(path.relative_to(path.anchor)))
    if not (matches := sorted(map(str, paths))):
        near = did_you_mean(path.name, (other.name for other in path.parent.glob("*.tar")))
        raise VitrailError(f"{address} does not exist{near or '; check the path'}")
    return matches


def _name_of(pattern: str) -> str:
    """The name of the data: the end of the path, without wildcards."""
    path = path_of(pattern) if is_url(pattern) else str(Path(pattern).absolute())
    *_, folder, last = ["shards", *path.rstrip("/").split("/")]
    fixed = re.split(r"[{*?\[]", last.removesuffix(".tar"))[0].strip("-_. ")
    return fixed if fixed and fixed.lower() not in PARTS else folder


# What they contain.


def _interpret(
    addresses: Sequence[str], indices: Sequence[Index], parts: Sequence[str], unlabeled: bool
) -> dict[str, ShardSource]:
    """The images of all shards by split; `parts` are the splits from the names of the shards."""
    labeled = any(any(index.labels) for index in indices)
    rows = [
        _place_of(member, label if labeled else None, part)
        for index, part in zip(indices, parts, strict=True)
        for member, label in zip(index.members, index.labels, strict=True)
    ]
    if unlabeled:
        rows = [(part, label or NO_CLASS, name.lstrip("/")) for part, label, name in rows]
    used = {label for _, label, _ in rows} - {""}
    if not used:
        raise VitrailError(
            f"{addresses[0]} has no class labels; expected <key>.cls or <key>.json beside each "
            "<key>.jpg, or <class>/<name>.jpg"
        )
    if len(used) == 1 and not unlabeled:
        raise VitrailError(f"{addresses[0]} has only one class, {listed([*used])}; expected two")
    if missing := sum(not label for _, label, _ in rows):
        say(f"skipping {missing:,} images without a label")
    numbers, labels = _numbered(used, addresses, indices) if labeled else _by_name(used)
    shards = tuple(
        Shard(address, index.length, index.beginning)
        for address, index in zip(addresses, indices, strict=True)
    )
    blocks = np.repeat(np.arange(len(indices)), [len(index.offsets) for index in indices])
    offsets = np.concatenate([index.offsets for index in indices])
    sizes = np.concatenate([index.sizes for index in indices])
    sources = {}
    for part in ("train", "val", "test"):
        own = np.array([i for i, row in enumerate(rows) if row[0] == part and row[1]], dtype=int)
        if len(own):
            sources[part] = ShardSource(
                labels,
                np.array([numbers[rows[i][1]] for i in own]),
                _unique([rows[i][2] for i in own], [shards[block].name for block in blocks[own]]),
                shards,
                blocks[own],
                offsets[own],
                sizes[own],
            )
    _check_parts(addresses, sources)
    return sources


def _place_of(member: str, given: str | None, part: str) -> tuple[str, str, str]:
    """The split, the label and the name of an image; the name is that of a class folder's file."""
    *folders, file = member.split("/")
    label = (folders.pop() if folders else "") if given is None else given
    above = (PARTS[folder.lower()] for folder in reversed(folders) if folder.lower() in PARTS)
    return next(above, part), label, member if given is not None else f"{label}/{file}"


def _check_parts(addresses: Sequence[str], sources: dict[str, ShardSource]) -> None:
    """Val and test may not have a class that train lacks."""
    train = sources.get("train")
    for part, source in sources.items():
        unknown = [] if train is None else np.setdiff1d(source.targets, train.targets)
        if len(unknown):
            names = listed([source.labels[number] for number in unknown])
            raise VitrailError(
                f"{addresses[0]} has images of {names} in {part} and none in train; "
                "give every split the same classes"
            )


def _by_name(used: set[str]) -> tuple[dict[str, int], tuple[str, ...]]:
    """The number of each class, and the sorted classes."""
    labels = sort_classes(used)
    return {label: number for number, label in enumerate(labels)}, labels


def _numbered(
    used: set[str], addresses: Sequence[str], indices: Sequence[Index]
) -> tuple[dict[str, int], tuple[str, ...]]:
    """The number of each label: itself, if all are numbers; a list may then name the classes."""
    if not all(re.fullmatch("[0-9]{1,9}", label) for label in used):
        return _by_name(used)
    numbers = {label: int(label) for label in used}
    classes = max(numbers.values()) + 1
    if classes > _MOST_CLASSES:
        raise VitrailError(f"{addresses[0]} has the label {classes - 1}; expected class numbers")
    names = next((tuple(index.classes) for index in indices if index.classes), ())
    names = names or _class_list(addresses[0])
    if not names:
        return numbers, tuple(map(str, range(classes)))
    if len(names) < classes:
        raise VitrailError(
            f"the class list of {addresses[0]} has {len(names)} lines, but there is a label "
            f"{classes - 1}; labels start at 0"
        )
    return numbers, names


def _class_list(address: str) -> tuple[str, ...]:
    """The class list beside a shard; empty if there is none."""
    folder = path_of(address).rpartition("/")[0] if "/" in address else "."
    for name in CLASS_LISTS:
        path = _fetched_list(f"{folder}/{name}") if is_url(address) else Path(folder, name)
        if path.is_file() and (lines := path.read_text("utf-8", "replace").strip()):
            return tuple(line.strip() for line in lines.splitlines())
    return ()


def _fetched_list(url: str) -> Path:
    """A class list on the web; an empty file in the cache means that there is none."""
    folder = cache_folder() / "shards" / "classes"
    try:
        return fetch_file(url, folder)
    except FailureError:
        raise
    except VitrailError:
        path = cached_path(url, folder)
        path.touch()
        return path


def _unique(names: list[str], shards: list[str]) -> list[str]:
    """Repeated names are prefixed with their shard's; the first one is unchanged."""
    if len(set(names)) == len(names):
        return names
    seen: set[str] = set()
    for i, shard in enumerate(shards):
        if names[i] in seen:
            names[i] = f"{shard.removesuffix('.tar')}/{names[i]}"
        while names[i] in seen:
            names[i] += "+"
        seen.add(names[i])
    return names
