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
from vitrail.data.dataset import Renamed, Source, Splits, Subset, hash_fractions
from vitrail.data.folder import holds_lists, open_lists
from vitrail.errors import VitrailError
from vitrail.vtab import files

_TRAIN, _VAL = 800, 200
"""Images of train and of val."""

Group = Literal["natural", "specialized", "structured"]
GROUPS: tuple[Group, ...] = ("natural", "specialized", "structured")


@dataclass(frozen=True, kw_only=True)
class Task:
    """One of the 19."""

    title: str
    """As in the ViT paper's Table 9."""
    group: Group
    classes: int
    whole: tuple[int, int, int]
    """Images of the parts that the 1,000 come from and of test: train, val, test."""
    lists: str
    """What the folder of its file lists is called."""
    fetch: Callable[[str, Path], Splits]
    """Gets the public files: name of the catalog and folder of all data sets."""
    labels: tuple[str, ...] = ()
    """What its derived classes mean; empty where the data names them itself."""
    per_class: int = 0
    """Images of each class that are not test, where the data brings no test part."""
    halved: bool = False
    """Half of the data's own test part is val."""


_DEPTHS = ("8.0 or less", "to 8.5", "to 9.0", "to 9.5", "to 10.0", "above 10.0")
METERS = ("8 m or less", "to 20 m", "above 20 m", "no vehicle")
_CLEVR = (63_000, 7_000, 15_000)
_SPRITES = (589_824, 73_728, 73_728)
_NORB = (24_300, 12_150, 12_150)

TASKS: dict[str, Task] = {
    "caltech101": Task(
        title="Caltech101", group="natural", classes=102, whole=(2_754, 306, 6_084),
        lists="caltech101", fetch=files.caltech101, per_class=30,
    ),
    "cifar100": Task(
        title="CIFAR-100", group="natural", classes=100, whole=(45_000, 5_000, 10_000),
        lists="cifar", fetch=torchvision_dataset("CIFAR100", FLAG),
    ),
    "dtd": Task(
        title="DTD", group="natural", classes=47, whole=(1_880, 1_880, 1_880),
        lists="dtd", fetch=torchvision_dataset("DTD", THREE),
    ),
    "flowers102": Task(
        title="Flowers102", group="natural", classes=102, whole=(1_020, 1_020, 6_149),
        lists="oxford_flowers102", fetch=torchvision_dataset("Flowers102", THREE),
    ),
    "pets": Task(
        title="Pets", group="natural", classes=37, whole=(2_944, 736, 3_669),
        lists="oxford_iiit_pet", fetch=torchvision_dataset("OxfordIIITPet", PETS),
    ),
    "sun397": Task(
        title="Sun397", group="natural", classes=397, whole=(76_128, 10_875, 21_750),
        lists="sun397", fetch=torchvision_dataset("SUN397", WHOLE),
    ),
    "svhn": Task(
        title="SVHN", group="natural", classes=10, whole=(65_931, 7_326, 26_032),
        lists="svhn", fetch=torchvision_dataset("SVHN", TWO),
    ),
    "camelyon": Task(
        title="Camelyon", group="specialized", classes=2, whole=(262_144, 32_768, 32_768),
        lists="patch_camelyon", fetch=files.camelyon,
    ),
    "eurosat": Task(
        title="EuroSAT", group="specialized", classes=10, whole=(16_200, 5_400, 5_400),
        lists="eurosat", fetch=torchvision_dataset("EuroSAT", WHOLE),
    ),
    "resisc45": Task(
        title="Resisc45", group="specialized", classes=45, whole=(18_900, 6_300, 6_300),
        lists="resisc45", fetch=partial(files.from_hand, "the 45 class folders of NWPU-RESISC45"),
    ),
    "retinopathy": Task(
        title="Retinopathy", group="specialized", classes=5, whole=(35_126, 10_906, 42_670),
        lists="diabetic_retinopathy", fetch=files.retinopathy,
    ),
    "clevr_count": Task(
        title="Clevr-Count", group="structured", classes=8, whole=_CLEVR, lists="clevr_count",
        fetch=partial(files.clevr, files.clevr_count), labels=tuple(map(str, range(3, 11))),
    ),
    "clevr_dist": Task(
        title="Clevr-Dist", group="structured", classes=6, whole=_CLEVR, lists="clevr_dist",
        fetch=partial(files.clevr, files.clevr_distance), labels=_DEPTHS,
    ),
    "dmlab": Task(
        title="DMLab", group="structured", classes=6, whole=(65_550, 22_628, 22_735),
        lists="dmlab",
        fetch=partial(files.from_hand, "train/ val/ test/ with one folder for each of 6 classes"),
    ),
    "dsprites_loc": Task(
        title="dSpr-Loc", group="structured", classes=16, whole=_SPRITES, lists="dsprites_loc",
        fetch=partial(files.dsprites, files.dsprites_location),
    ),
    "dsprites_ori": Task(
        title="dSpr-Ori", group="structured", classes=16, whole=_SPRITES, lists="dsprites_ori",
        fetch=partial(files.dsprites, files.dsprites_orientation),
    ),
    "kitti_dist": Task(
        title="KITTI-Dist", group="structured", classes=4, whole=(6_347, 423, 711),
        lists="kitti", fetch=partial(files.kitti, files.kitti_distance), labels=METERS,
    ),
    "smallnorb_azim": Task(
        title="sNORB-Azim", group="structured", classes=18, whole=_NORB, lists="smallnorb_azi",
        fetch=partial(files.smallnorb, files.smallnorb_azimuth), halved=True,
    ),
    "smallnorb_elev": Task(
        title="sNORB-Elev", group="structured", classes=9, whole=_NORB, lists="smallnorb_ele",
        fetch=partial(files.smallnorb, files.smallnorb_elevation), halved=True,
    ),
}  # fmt: skip
"""By the last part of their names in the catalog, in the order of Table 9."""


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
    """Where the file lists of a task lie: under its own name or under the usual one, if at all."""
    short = name.removeprefix("vtab/")
    names = (short, TASKS[short].lists)
    places = [folder / root / below for root in ("vtab", "vtab-1k") for below in names]
    return next((place for place in places if holds_lists(place)), None)


def _from_lists(name: str, folder: Path) -> Splits | None:
    """A task with the benchmark's own 1,000 images, where their lists are there."""
    place = lists_of(name, folder)
    return None if place is None else open_lists(place)


def as_vtab(short: str, data: Splits) -> Splits:
    """The 800, the 200 and test, out of whatever parts the data brings."""
    task, name = TASKS[short], f"vtab/{short}"
    if brings_thousand(data) and data.test is None:
        raise VitrailError(
            f"{name}: the data has the 1,000 images and no test part; add it, or bring all images"
        )
    if sizes(data)[:2] == (_TRAIN + _VAL, 0):  # both, in one list
        say_once(f"{name}: which 200 of the 1,000 images are val is this project's own draw")
        train, val = _drawn(data.part("train"), _TRAIN, _VAL)
        data = replace(data, train=train, val=val)
    elif sizes(data)[:2] != (_TRAIN, _VAL):
        say_once(
            f"{name}: the 1,000 images are drawn by this project's own seed, not TFDS's; the "
            "benchmark's own come from file lists (docs/transfer.md)"
        )
        data = _thousand(name, parted(task, data))
    parts = {part: _named(name, task, files.in_memory(x)) for part, x in data.parts.items()}
    return Splits(name=name, **parts)


def brings_thousand(data: Splits) -> bool:
    """Whether somebody drew the 1,000 images already."""
    return sizes(data)[:2] in ((_TRAIN, _VAL), (_TRAIN + _VAL, 0))


def sizes(data: Splits) -> tuple[int, int, int]:
    """Images of train, val and test."""
    train, val, test = (
        0 if part is None else len(part.targets) for part in (data.train, data.val, data.test)
    )
    return train, val, test


@cache
def say_once(line: str) -> None:
    """A sweep opens its data many times."""
    say(line)


def parted(task: Task, data: Splits) -> Splits:
    """With val and test as large as the benchmark's, taken from where it takes them."""
    train, val, test = data.part("train"), data.val, data.test
    if test is None and task.per_class:
        train, test = _some_of_each_class(train, task.per_class)
    if task.halved and val is None and test is not None:
        val, test = _drawn(test, len(test.targets) // 2, len(test.targets) - len(test.targets) // 2)
    wanted = [0 if val is not None else task.whole[1], 0 if test is not None else task.whole[2]]
    there = len(train.targets)
    counts = [round(there * n / (task.whole[0] + sum(wanted))) for n in wanted]
    rest, new_val, new_test = _drawn(train, there - sum(counts), *counts)
    return Splits(
        name=data.name,
        train=rest,
        val=new_val if val is None else val,
        test=new_test if test is None else test,
    )


def _thousand(name: str, data: Splits) -> Splits:
    """The first 800 and 200 of this project's order."""
    few = {"train": _TRAIN, "val": _VAL}
    for part, n in few.items():
        if (there := len(data.part(part).targets)) < n:
            raise VitrailError(
                f"{name}: {there} images can be {part}, VTAB-1k has {n}; is the data whole?"
            )
    train, val = (_drawn(data.part(part), n)[0] for part, n in few.items())
    return replace(data, train=train, val=val)


def _drawn(source: Source, *counts: int) -> list[Subset]:
    """Parts of so many images each, in an order that follows from their names alone."""
    order: Int[np.ndarray, " n"] = np.argsort(
        hash_fractions(f"vtab/{name}" for name in source.names), kind="stable"
    )
    ends = np.cumsum(counts)
    return [
        Subset(source, np.sort(order[end - n : end])) for n, end in zip(counts, ends, strict=True)
    ]


def _some_of_each_class(source: Source, n: int) -> tuple[Source, Source]:
    """So many images of each class, and all others."""
    # Not the order of `_drawn`: whose image is first among many would be first there as well.
    at = hash_fractions(f"vtab/class/{name}" for name in source.names)
    order = np.lexsort((at, source.targets))
    starts = np.searchsorted(source.targets[order], source.targets[order])
    first = np.zeros(len(order), dtype=bool)
    first[order] = np.arange(len(order)) - starts < n
    return Subset(source, np.flatnonzero(first)), Subset(source, np.flatnonzero(~first))


def _named(name: str, task: Task, source: Source) -> Source:
    """With all classes of the task, by their meaning where they have only numbers."""
    labels = source.labels
    if labels != tuple(map(str, range(len(labels)))):
        if len(labels) == task.classes:
            return source
    elif len(labels) <= task.classes:
        return Renamed(source, task.labels or tuple(map(str, range(task.classes))))
    raise VitrailError(f"{name} has {task.classes} classes, the data here {len(labels)}")
