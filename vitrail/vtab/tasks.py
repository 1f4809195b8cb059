"""VTAB-1k (Zhai et al. 2019, arXiv 1910.04867): 19 tasks of 1,000 training images, without
TensorFlow.

800 images are for training and 200 for choosing settings; the final model trains on both and is
tested on the whole test split. The benchmark's 1,000 images follow from the order in which
TensorFlow Datasets stores them: file lists name those; from other sources, this project draws its
own and says so.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Int

from vitrail.console import say
from vitrail.data.catalog import FLAG, PETS, THREE, TWO, WHOLE, CatalogEntry, torchvision_dataset
from vitrail.data.dataset import Renamed, Source, Splits, Subset, hash_fractions, subset
from vitrail.data.folder import has_lists, open_lists
from vitrail.errors import VitrailError
from vitrail.vtab import files

_TRAIN, _VAL = 800, 200
"""Images of train and of val."""

Group = Literal["natural", "specialized", "structured"]
GROUPS: tuple[Group, ...] = ("natural", "specialized", "structured")


@dataclass(frozen=True, kw_only=True)
class VtabTask:
    """One of the 19 tasks."""

    title: str
    """As in the ViT paper's Table 9."""
    group: Group
    classes: int
    whole: tuple[int, int, int]
    """Images of train and val, which the 1,000 are drawn from, and of test."""
    lists: str
    """The usual name of the folder of its file lists."""
    fetch: Callable[[str, Path], Splits]
    """Downloads the public files, given the catalog name and the folder of all datasets."""
    labels: tuple[str, ...] = ()
    """Names for its derived classes; empty if the data has names."""
    per_class: int = 0
    """Images of each class that are not test, if the data has no test split."""
    halved: bool = False
    """Whether val is half of the data's own test split."""


_DEPTHS = ("8.0 or less", "to 8.5", "to 9.0", "to 9.5", "to 10.0", "above 10.0")
METERS = ("8 m or less", "to 20 m", "above 20 m", "no vehicle")
_CLEVR = (63_000, 7_000, 15_000)
_SPRITES = (589_824, 73_728, 73_728)
_NORB = (24_300, 12_150, 12_150)

TASKS: dict[str, VtabTask] = {
    "caltech101": VtabTask(
        title="Caltech101", group="natural", classes=102, whole=(2_754, 306, 6_084),
        lists="caltech101", fetch=files.caltech101, per_class=30,
    ),
    "cifar100": VtabTask(
        title="CIFAR-100", group="natural", classes=100, whole=(45_000, 5_000, 10_000),
        lists="cifar", fetch=torchvision_dataset("CIFAR100", FLAG),
    ),
    "dtd": VtabTask(
        title="DTD", group="natural", classes=47, whole=(1_880, 1_880, 1_880),
        lists="dtd", fetch=torchvision_dataset("DTD", THREE),
    ),
    "flowers102": VtabTask(
        title="Flowers102", group="natural", classes=102, whole=(1_020, 1_020, 6_149),
        lists="oxford_flowers102", fetch=torchvision_dataset("Flowers102", THREE),
    ),
    "pets": VtabTask(
        title="Pets", group="natural", classes=37, whole=(2_944, 736, 3_669),
        lists="oxford_iiit_pet", fetch=torchvision_dataset("OxfordIIITPet", PETS),
    ),
    "sun397": VtabTask(
        title="Sun397", group="natural", classes=397, whole=(76_128, 10_875, 21_750),
        lists="sun397", fetch=torchvision_dataset("SUN397", WHOLE),
    ),
    "svhn": VtabTask(
        title="SVHN", group="natural", classes=10, whole=(65_931, 7_326, 26_032),
        lists="svhn", fetch=torchvision_dataset("SVHN", TWO),
    ),
    "camelyon": VtabTask(
        title="Camelyon", group="specialized", classes=2, whole=(262_144, 32_768, 32_768),
        lists="patch_camelyon", fetch=files.camelyon,
    ),
    "eurosat": VtabTask(
        title="EuroSAT", group="specialized", classes=10, whole=(16_200, 5_400, 5_400),
        lists="eurosat", fetch=torchvision_dataset("EuroSAT", WHOLE),
    ),
    "resisc45": VtabTask(
        title="Resisc45", group="specialized", classes=45, whole=(18_900, 6_300, 6_300),
        lists="resisc45",
        fetch=partial(files.not_downloadable, "the 45 class folders of NWPU-RESISC45"),
    ),
    "retinopathy": VtabTask(
        title="Retinopathy", group="specialized", classes=5, whole=(35_126, 10_906, 42_670),
        lists="diabetic_retinopathy", fetch=files.retinopathy,
    ),
    "clevr_count": VtabTask(
        title="Clevr-Count", group="structured", classes=8, whole=_CLEVR, lists="clevr_count",
        fetch=partial(files.clevr, files.clevr_count), labels=tuple(map(str, range(3, 11))),
    ),
    "clevr_dist": VtabTask(
        title="Clevr-Dist", group="structured", classes=6, whole=_CLEVR, lists="clevr_dist",
        fetch=partial(files.clevr, files.clevr_distance), labels=_DEPTHS,
    ),
    "dmlab": VtabTask(
        title="DMLab", group="structured", classes=6, whole=(65_550, 22_628, 22_735),
        lists="dmlab",
        fetch=partial(files.not_downloadable, "train/ val/ test/ with 6 class folders each"),
    ),
    "dsprites_loc": VtabTask(
        title="dSpr-Loc", group="structured", classes=16, whole=_SPRITES, lists="dsprites_loc",
        fetch=partial(files.dsprites, files.dsprites_location),
    ),
    "dsprites_ori": VtabTask(
        title="dSpr-Ori", group="structured", classes=16, whole=_SPRITES, lists="dsprites_ori",
        fetch=partial(files.dsprites, files.dsprites_orientation),
    ),
    "kitti_dist": VtabTask(
        title="KITTI-Dist", group="structured", classes=4, whole=(6_347, 423, 711),
        lists="kitti", fetch=partial(files.kitti, files.kitti_distance), labels=METERS,
    ),
    "smallnorb_azim": VtabTask(
        title="sNORB-Azim", group="structured", classes=18, whole=_NORB, lists="smallnorb_azi",
        fetch=partial(files.smallnorb, files.smallnorb_azimuth), halved=True,
    ),
    "smallnorb_elev": VtabTask(
        title="sNORB-Elev", group="structured", classes=9, whole=_NORB, lists="smallnorb_ele",
        fetch=partial(files.smallnorb, files.smallnorb_elevation), halved=True,
    ),
}  # fmt: skip
"""By their names in the catalog without `vtab/`, in the order of Table 9."""


def entries() -> dict[str, CatalogEntry]:
    """The tasks as entries of the catalog."""
    return {
        f"vtab/{short}": CatalogEntry(
            f"VTAB-1k: {task.title}",
            task.classes,
            _TRAIN + _VAL + task.whole[2],
            task.fetch,
            "VTAB-1k",
            partial(as_vtab, short),
            _from_lists,
            task,
        )
        for short, task in TASKS.items()
    }


def lists_of(name: str, folder: Path) -> Path | None:
    """The folder with the file lists of a task, by its own name or the usual one, if it exists."""
    short = name.removeprefix("vtab/")
    names = (short, TASKS[short].lists)
    folders = [folder / root / below for root in ("vtab", "vtab-1k") for below in names]
    return next((path for path in folders if has_lists(path)), None)


def _from_lists(name: str, folder: Path) -> Splits | None:
    """A task with the benchmark's own 1,000 images, if there are file lists."""
    path = lists_of(name, folder)
    return None if path is None else open_lists(path)


def as_vtab(short: str, data: Splits) -> Splits:
    """800 images for train, 200 for val, and test, from whatever splits the data has."""
    task, name = TASKS[short], f"vtab/{short}"
    if has_thousand(data) and data.test is None:
        raise VitrailError(
            f"{name}: the data has the 1,000 training images but no test split; add one, or "
            "provide the full dataset"
        )
    if sizes(data)[:2] == (_TRAIN + _VAL, 0):  # both, in one list
        say_once(f"{name}: the 200 val images are drawn from the 1,000 by this project's own seed")
        train, val = _draw(data.part("train"), _TRAIN, _VAL)
        data = replace(data, train=train, val=val)
    elif sizes(data)[:2] != (_TRAIN, _VAL):
        say_once(
            f"{name}: the 1,000 images are drawn by this project's own seed, not TFDS's; the "
            "file lists give the benchmark's own (docs/transfer.md)"
        )
        data = _draw_thousand(name, resplit(task, data))
    parts = {part: _with_labels(name, task, files.in_memory(x)) for part, x in data.parts.items()}
    return Splits(name=name, **parts)


def has_thousand(data: Splits) -> bool:
    """Whether the 1,000 images are drawn already."""
    return sizes(data)[:2] in ((_TRAIN, _VAL), (_TRAIN + _VAL, 0))


def sizes(data: Splits) -> tuple[int, int, int]:
    """The number of images of train, val and test."""
    train, val, test = (
        0 if part is None else len(part.targets) for part in (data.train, data.val, data.test)
    )
    return train, val, test


@cache
def say_once(line: str) -> None:
    """Says a line once per process: a sweep opens its data many times."""
    say(line)


def resplit(task: VtabTask, data: Splits) -> Splits:
    """The data with val and test in the benchmark's proportions, taken from the same splits."""
    train, val, test = data.part("train"), data.val, data.test
    if test is None and task.per_class:
        train, test = _some_of_each_class(train, task.per_class)
    if task.halved and val is None and test is not None:
        val, test = _draw(test, len(test.targets) // 2, len(test.targets) - len(test.targets) // 2)
    missing = [0 if val is not None else task.whole[1], 0 if test is not None else task.whole[2]]
    total = len(train.targets)
    counts = [round(total * n / (task.whole[0] + sum(missing))) for n in missing]
    rest, new_val, new_test = _draw(train, total - sum(counts), *counts)
    return Splits(
        name=data.name,
        train=rest,
        val=new_val if val is None else val,
        test=new_test if test is None else test,
    )


def _draw_thousand(name: str, data: Splits) -> Splits:
    """800 images of train and 200 of val, the first of this project's order."""
    counts = {"train": _TRAIN, "val": _VAL}
    for split, n in counts.items():
        if (available := len(data.part(split).targets)) < n:
            raise VitrailError(
                f"{name}: only {available} images available for {split}, but VTAB-1k needs {n}; "
                "is the dataset complete?"
            )
    train, val = (_draw(data.part(split), n)[0] for split, n in counts.items())
    return replace(data, train=train, val=val)


def _draw(source: Source, *counts: int) -> list[Subset]:
    """Disjoint subsets of so many images each, drawn by a hash of their names."""
    order: Int[np.ndarray, " n"] = np.argsort(
        hash_fractions(f"vtab/{name}" for name in source.names), kind="stable"
    )
    ends = np.cumsum(counts)
    return [
        Subset(source, np.sort(order[end - n : end])) for n, end in zip(counts, ends, strict=True)
    ]


def _some_of_each_class(source: Source, n: int) -> tuple[Source, Source]:
    """`n` images of each class, and the rest."""
    # Not the hashes of `_draw`: images chosen here would come first there as well.
    hashes = hash_fractions(f"vtab/class/{name}" for name in source.names)
    order = np.lexsort((hashes, source.targets))
    starts = np.searchsorted(source.targets[order], source.targets[order])
    chosen = np.zeros(len(order), dtype=bool)
    chosen[order] = np.arange(len(order)) - starts < n
    return subset(source, chosen), subset(source, ~chosen)


def _with_labels(name: str, task: VtabTask, source: Source) -> Source:
    """The source with all classes of the task; those that are only numbers get their names."""
    labels = source.labels
    if labels != tuple(map(str, range(len(labels)))):
        if len(labels) == task.classes:
            return source
    elif len(labels) <= task.classes:
        return Renamed(source, task.labels or tuple(map(str, range(task.classes))))
    raise VitrailError(f"{name} has {task.classes} classes, but this dataset has {len(labels)}")
