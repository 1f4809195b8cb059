"""Opens data, wherever it is stored, as train, val and test."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.console import say
from vitrail.data import catalog
from vitrail.data.dataset import Source, SplitMethod, Splits, Subset, hold_out, random_subset
from vitrail.data.folder import holds_lists, open_folder, open_lists
from vitrail.data.shards import holds_shards, looks_like_shards, open_shards
from vitrail.data.store import is_store, open_store
from vitrail.data.tars import is_url
from vitrail.errors import VitrailError, did_you_mean, one_line


def same_data(one: str | Path, other: str | Path) -> bool:
    """Whether two names are those of one data set: the same string, or the same path."""
    if str(one) == str(other):
        return True
    a, b = Path(one), Path(other)
    return a.exists() and b.exists() and a.resolve() == b.resolve()


def open_data(
    where: str | Path | Splits,
    *,
    val: float = 0.1,
    test: float = 0.1,
    split: SplitMethod = "hash",
    subset: int = 0,
    seed: int = 0,
    only: str | Path = "",
) -> Splits:
    """A folder, file lists, tar files, a store or a name of the catalog, with train, val, test.

    Splits that the data does not come with are taken out of train: fractions `test`, then `val`.
    Of the rest, only the images named in the file `only` are used, if there is one; then `subset`
    images of train are drawn by the `seed`. Zero takes nothing out, or draws all.
    """
    brought = where if isinstance(where, Splits) else open_original(where)
    data = hold_out(brought, val=val, test=test, how=split)
    if only:
        data = replace(data, train=_named_in(Path(only), data.part("train")))
    if not subset:
        return data
    return replace(data, train=random_subset(data.part("train"), subset, seed))


def in_catalog(where: str | Path) -> bool:
    """Whether a name means the catalog's data set: a local path of that name comes first."""
    if str(where) not in catalog.CATALOG:
        return False
    path, own = Path(where), catalog.data_folder() / where
    # In the folder of all data sets, the relative path is the catalog's own folder.
    return not path.exists() or (own.exists() and path.samefile(own))


def open_original(where: str | Path, unlabeled: bool = False) -> Splits:
    """The data with the splits that it comes with; `unlabeled` images need no classes."""
    path = Path(where).expanduser()
    if in_catalog(where):
        return catalog.open_named(str(where))
    if str(where) in catalog.CATALOG:
        say(f"data     ./{where} is used, not the catalog's data set of that name")
    if is_store(path):
        return open_store(path)
    if is_url(str(where)) or looks_like_shards(str(where)):
        return open_shards(str(where) if is_url(str(where)) else str(path), unlabeled)
    if not path.is_dir():
        raise _nothing_there(str(where))
    if holds_lists(path):
        return open_lists(path)
    if holds_shards(path):
        return open_shards(str(path), unlabeled)
    return open_folder(path, unlabeled)


def refuse_brought(brought: Splits, given: Mapping[str, Any]) -> None:
    """Refuses settings for a split that the data comes with, since they would have no effect."""
    parts = brought.parts
    if "train" not in parts:
        return
    for part in ("val", "test"):
        if part in parts and given.get(part):
            raise VitrailError(
                f"data.{part}={given[part]:g} has no effect: {brought.name} brings a {part} part "
                f"of {len(parts[part].targets):,} images; leave data.{part} out"
            )
    if "split" in given and {"val", "test"} <= parts.keys():
        raise VitrailError(
            f"data.split={given['split']} has no effect: {brought.name} brings a val and a test "
            "part; leave data.split out"
        )


def _named_in(path: Path, source: Source) -> Subset:
    """The images whose names a file lists, one on each line, as `vitrail data` writes them."""
    try:
        names = set(path.read_text(encoding="utf-8").split("\n"))
    except (OSError, UnicodeError) as error:
        raise VitrailError(f"cannot read the names in {path} ({one_line(error)})") from None
    indices = [index for index, name in enumerate(source.names) if name in names]
    if not indices:
        raise VitrailError(f"{path} names no image of train, as `{source.names[0]}` would be")
    return Subset(source, np.array(indices, dtype=np.int64))


def _nothing_there(where: str) -> VitrailError:
    """Neither a path nor a name."""
    place = Path(where)
    with suppress(OSError):
        if place.expanduser().exists():
            what = "a file" if place.expanduser().is_file() else "neither a file nor a folder"
            return VitrailError(f"{where} is {what}; expected a folder with one folder per class")
    if where.startswith("vtab/") and find_spec("vitrail.vtab") is None:
        return VitrailError(f"{where} needs the package vitrail.vtab; install Vitrail with it")
    beside = [str(place.with_name(path.name)) for path in place.expanduser().parent.glob("*")]
    near = did_you_mean(where, [*catalog.CATALOG, *beside])
    return VitrailError(
        f"'{where}' is no folder, no tar file and no name of the catalog"
        f"{near or '; give a folder with one folder per class'}"
    )
