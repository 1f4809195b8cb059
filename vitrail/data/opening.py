"""Opens data, however it is stored, as train, val and test.

`open_stored` opens what is there, `open_data` also takes missing splits out of train, and
`open_run_data` does so by the settings of a run.
"""

from collections.abc import Sequence, Set
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from vitrail.config import Config
from vitrail.console import require, say
from vitrail.data.catalog import data_folder, known_datasets, open_named
from vitrail.data.dataset import (
    Joined,
    Source,
    SplitMethod,
    Splits,
    Subset,
    hold_out,
    random_subset,
)
from vitrail.data.folder import has_lists, open_folder, open_lists
from vitrail.data.shards import has_shards, looks_like_shards, open_shards
from vitrail.data.store import is_store, open_store
from vitrail.data.tars import is_url
from vitrail.errors import VitrailError, did_you_mean, one_line


def same_data(one: str | Path, other: str | Path) -> bool:
    """Whether two names mean the same dataset: equal strings, or the same path."""
    if str(one) == str(other):
        return True
    a, b = Path(one), Path(other)
    return a.exists() and b.exists() and a.resolve() == b.resolve()


def open_data(
    source: str | Path | Splits,
    *,
    val: float = 0.1,
    test: float = 0.1,
    split: SplitMethod = "hash",
    subset: int = 0,
    seed: int = 0,
    only: str | Path = "",
) -> Splits:
    """Opens a folder, file lists, tar files, a store or a catalog name as train, val and test.

    For use from Python, and by evaluation, which repeats the splits of a run. Missing splits are
    taken out of train: the fractions `test` and `val`. Train then keeps only the images named in
    the file `only`, if given, and of those `subset` images, drawn by `seed`. Zero takes nothing
    out, or keeps all.
    """
    original = source if isinstance(source, Splits) else open_stored(source)
    data = hold_out(original, val=val, test=test, how=split)
    if only:
        data = replace(data, train=_named_in(Path(only), data.part("train")))
    if not subset:
        return data
    return replace(data, train=random_subset(data.part("train"), subset, seed))


def in_catalog(source: str | Path) -> bool:
    """Whether a name means the catalog's dataset: a local path of that name comes first."""
    if str(source) not in known_datasets():
        return False
    path, own = Path(source), data_folder() / source
    # In the folder of all datasets, the relative path is the catalog's own folder.
    return not path.exists() or (own.exists() and path.samefile(own))


def open_stored(source: str | Path, unlabeled: bool = False) -> Splits:
    """The data with only the splits it is stored with; `unlabeled` images need no classes.

    The first step of the other two, and for data that is compared or evaluated as a whole.
    """
    path = Path(source).expanduser()
    if in_catalog(source):
        return open_named(str(source))
    if str(source) in known_datasets():
        say(f"data     using ./{source}, not the catalog's dataset of that name")
    if is_store(path):
        return open_store(path)
    if is_url(str(source)) or looks_like_shards(str(source)):
        return open_shards(str(source) if is_url(str(source)) else str(path), unlabeled)
    if not path.is_dir():
        raise _not_found(str(source))
    if has_lists(path):
        return open_lists(path)
    if has_shards(path):
        return open_shards(str(path), unlabeled)
    return open_folder(path, unlabeled)


def open_run_data(
    config: Config, changed: Sequence[str] = (), original: Splits | None = None
) -> Splits:
    """The data of a run, split as its settings say: for `train`, `sweep` and `vitrail data`.

    `changed` are settings beyond the recipe's, `data.val=0.2`, which are refused if they have no
    effect; `original` is what `open_stored` returned, if the data is open already.
    """
    settings = config.data
    if not settings.source:
        raise VitrailError("no data: set data.source to a folder, tar files or a catalog name")
    try:
        settings.source.encode()
    except UnicodeEncodeError:
        raise VitrailError(
            f"data.source={settings.source!a} is not valid UTF-8; rename it"
        ) from None
    if original is None:
        original = open_stored(settings.source, unlabeled=not config.train.uses_labels)
    names = {setting.partition("=")[0].removeprefix("sweep.") for setting in changed}
    _refuse_ineffective(config, original, names)
    train_on_val = settings.train_on == "train+val"
    data = open_data(
        original,
        # What is not held out at first is part of train, and of its subset.
        val=0.0 if train_on_val else settings.val,
        test=settings.test,
        split=settings.split,
        subset=settings.subset,
        only=settings.only,
        seed=config.seed,
    )
    if train_on_val and data.val is not None:  # the data has its own val split
        return replace(data, train=Joined(data.part("train"), data.val), val=None)
    if config.train.patience and data.val is None and not train_on_val:
        raise VitrailError("train.patience needs a val split to evaluate on; set data.val")
    return data


def _refuse_ineffective(config: Config, original: Splits, names: Set[str]) -> None:
    """Refuses the settings called `names` if they are about splits that the data has already."""
    splits = original.parts
    if "train" not in splits:
        return
    for split in ("val", "test"):
        fraction = getattr(config.data, split)
        if split in splits and fraction and f"data.{split}" in names:
            raise VitrailError(
                f"data.{split}={fraction:g} has no effect: {original.name} already has a {split} "
                f"split of {len(splits[split].targets):,} images; remove data.{split}"
            )
    if "data.split" in names and {"val", "test"} <= splits.keys():
        raise VitrailError(
            f"data.split={config.data.split} has no effect: {original.name} already has val and "
            "test splits; remove data.split"
        )


def _named_in(path: Path, source: Source) -> Subset:
    """The images listed in a file, one name per line, as `vitrail data --filtered` writes it."""
    try:
        names = set(path.read_text(encoding="utf-8").split("\n"))
    except (OSError, UnicodeError) as error:
        raise VitrailError(f"cannot read the list {path} ({one_line(error)})") from None
    indices = [index for index, name in enumerate(source.names) if name in names]
    if not indices:
        raise VitrailError(
            f"{path} lists no training image; expected names such as {source.names[0]}"
        )
    return Subset(source, np.array(indices, dtype=np.int64))


def _not_found(source: str) -> VitrailError:
    path = Path(source)
    with suppress(OSError):
        if path.expanduser().exists():
            what = "a file" if path.expanduser().is_file() else "neither a file nor a folder"
            return VitrailError(f"{source} is {what}; expected a folder with one folder per class")
    if source.startswith("vtab/"):
        require("vtab.tasks", source)
    siblings = [str(path.with_name(x.name)) for x in path.expanduser().parent.glob("*")]
    near = did_you_mean(source, [*known_datasets(), *siblings])
    return VitrailError(
        f"'{source}' is neither a folder, a tar file nor a catalog name"
        f"{near or '; give a folder with one folder per class'}"
    )
