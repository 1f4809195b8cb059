"""`vitrail data`: counts, sizes, broken images and warnings of a dataset, and contact sheets of it.

Finding duplicates and their report are packages that an installation may lack.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int
from PIL import Image

from vitrail.config import build_config, changed_settings, parse_setting, set_value, with_settings
from vitrail.console import Advance, count_progress, echo, print_table, require
from vitrail.data.dataset import Broken, Source, Splits, listed
from vitrail.data.loader import read_all
from vitrail.data.opening import open_run_data, open_stored
from vitrail.data.sheets import contact_sheet
from vitrail.data.store import pack_data
from vitrail.errors import VitrailError
from vitrail.files import atomic_write, write_text

_FEW = 10
"""Images that a class needs for a model to learn it at all."""
_UNEVEN = 10.0
"""Ratio of the largest to the smallest class above which a warning is given."""
_SMALL = 32
"""Images with a shorter side are reported as small."""
_PURPOSES = {
    "train": "train on",
    "val": "choose settings on",
    "test": "measure the final model on",
}
_BAR = 24


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """What `vitrail data` does besides counting."""

    check: bool = False
    """Decode every image."""
    duplicates: bool = False
    against: tuple[str, ...] = ()
    """Other datasets to search for duplicates."""
    mirrored: bool = False
    """Mirror images are duplicates, too."""
    report: str = ""
    """Where to write a page about the duplicates."""
    filtered: str = ""
    """Where to list the training images that have no duplicate in val, test or `against`."""
    sheet: bool = False
    pack: str = ""
    """Where to write a store; training images with a duplicate in `against` are left out."""
    split: bool = False
    workers: int = 0


def check_dataset(
    what: str | Path, options: CheckOptions, settings: Mapping[str, Any] | Sequence[str] = ()
) -> dict[str, Any]:
    """What `vitrail data` reports and writes: one entry for each thing requested."""
    searching = bool(options.duplicates or options.against)
    if (options.report or options.filtered or options.mirrored) and not searching:
        raise VitrailError(
            "--report, --filtered and --mirrored need --duplicates or --against DATA"
        )
    pairs = settings.items() if isinstance(settings, Mapping) else map(parse_setting, settings)
    values: dict[str, Any] = {}
    for name, value in [("data.source", str(what)), *pairs]:
        set_value(values, name, value)
    config = build_config(values)
    original = open_stored(what, unlabeled=not config.train.uses_labels)
    data = whole = open_run_data(config, changed_settings(config), original)
    if options.pack:
        # A store is split when it is opened, as the data itself would be.
        undivided = with_settings(config, {"data.val": 0.0, "data.test": 0.0})
        whole = open_run_data(undivided, original=original)
    result: dict[str, Any] = {}
    with count_progress(f"reading {data.name}") as advance:
        result["check"] = (
            check_images(data, workers=options.workers, progress=advance)
            if options.check
            else describe_dataset(data)
        )
        if searching:
            duplicates = require("duplicates.find", "finding duplicates")
            result["duplicates"] = duplicates.find(
                whole,
                against=[open_stored(other) for other in options.against],
                inside=options.duplicates,
                mirrored=options.mirrored,
                workers=options.workers,
                progress=advance,
            )
    result |= _write_outputs(whole, options, result.get("duplicates"))
    if options.sheet:
        target = Path(f"{Path(data.name).name or 'data'}-sheet.jpg")
        image = contact_sheet(data.part("train"))
        atomic_write(target, lambda part: image.save(part, format="JPEG", quality=88))
        result["sheet"] = str(target)
    if options.split:
        result["split"] = {name: list(part.names) for name, part in data.parts.items()}
    return result


def _write_outputs(data: Splits, options: CheckOptions, duplicates: Any) -> dict[str, Any]:
    """Writes the page, the list and the store; returns where, and what was left out."""
    result: dict[str, Any] = {}
    removed: dict[str, str] = {}
    if options.report:
        page = require("reporting.duplicates", "--report")
        result["report"] = str(page.write(duplicates, Path(options.report)))
    if options.filtered or options.against:
        train, removed = duplicates.without_leaks(data)
        result["kept"], result["removed"] = len(train.targets), len(removed)
        if options.filtered:
            write_text(Path(options.filtered), "".join(f"{name}\n" for name in train.names))
            result["filtered"] = options.filtered
        if options.against:
            data = replace(data, train=train)
    if options.pack:
        with count_progress(f"packing {data.name}") as advance:
            broken = pack_data(data, Path(options.pack), progress=advance)
        result["pack"] = [*broken, *(removed.items() if options.against else ())]
    return result


@dataclass(frozen=True, kw_only=True)
class SplitStats:
    """One split of a dataset; what only decoding shows is empty until every image is read."""

    name: str
    counts: dict[str, int]
    """Images of each class, broken ones included."""
    sizes: Int[np.ndarray, "n 2"] | None = None
    """Width and height of each readable image."""
    broken: tuple[Broken, ...] = ()
    small: tuple[str, ...] = ()
    blank: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def spread(self) -> dict[str, dict[str, int | float]] | None:
        """Smallest, median and largest width and height."""
        if self.sizes is None or not len(self.sizes):
            return None
        return {
            side: {
                "min": int(values.min()),
                "median": float(np.median(values)),
                "max": int(values.max()),
            }
            for side, values in zip(("width", "height"), self.sizes.T, strict=True)
        }

    def to_dict(self) -> dict[str, Any]:
        counts = {"n": self.total, "classes": self.counts}
        if self.sizes is None:
            return counts
        return counts | {
            "size": self.spread(),
            "broken": [list(broken) for broken in self.broken],
            "small": list(self.small),
            "blank": list(self.blank),
        }


@dataclass(frozen=True)
class DatasetReport:
    """Classes, counts and warnings of a dataset, for the terminal and as JSON."""

    name: str
    labels: tuple[str, ...]
    parts: tuple[SplitStats, ...]

    @property
    def imbalance(self) -> float:
        """How many times as many images the largest class has as the smallest that has any."""
        counts = [count for count in self.parts[0].counts.values() if count]
        return max(counts, default=1) / min(counts, default=1)

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "labels": list(self.labels),
            "parts": {part.name: part.to_dict() for part in self.parts},
            "imbalance": self.imbalance,
            "warnings": self.warnings(),
        }

    def warnings(self) -> list[str]:
        present = {part.name for part in self.parts}
        lines = [
            f"no {name} split: nothing to {purpose}"
            for name, purpose in _PURPOSES.items()
            if name not in present
        ]
        lines += absent_classes(self.parts)
        first = self.parts[0]  # the split whose balance matters
        few = [f"{label} ({n})" for label, n in first.counts.items() if 0 < n < _FEW]
        if few:
            lines.append(f"{first.name} has fewer than {_FEW} images of {listed(few, quote='')}")
        if self.imbalance > _UNEVEN:
            lines.append(
                f"the largest class has {self.imbalance:.0f} times as many images as the "
                "smallest; consider class weights or balanced sampling"
            )
        decoded = {
            "broken": "images that cannot be decoded, which training skips",
            "small": f"images smaller than {_SMALL} pixels on a side",
            "blank": "images of a single color",
        }
        counts = {x: sum(len(getattr(part, x)) for part in self.parts) for x in decoded}
        return lines + [f"{decoded[x]}: {count:,}" for x, count in counts.items() if count]

    def rows(self, most: int = 30) -> tuple[list[str], list[list[str]]]:
        """A table of the classes; if there are many, of the largest and the smallest."""
        names = [part.name for part in self.parts]
        totals = {
            label: sum(part.counts.get(label, 0) for part in self.parts) for label in self.labels
        }
        largest = max(1, *totals.values())

        def row(label: str) -> list[str]:
            counts = [f"{part.counts.get(label, 0):,}" for part in self.parts]
            return [label, *counts, "█" * round(_BAR * totals[label] / largest)]

        shown = [row(label) for label in self.labels]
        if len(shown) > most:
            by_size = sorted(self.labels, key=lambda label: -totals[label])
            gap = ["…", *("" for _ in names), f"{len(shown) - most:,} more"]
            half = most // 2
            shown = [*map(row, by_size[:half]), gap, *map(row, by_size[half - most :])]
        return ["class", *names, ""], shown

    def lines(self, most: int = 10) -> list[str]:
        lines = []
        for part in self.parts:
            if spread := part.spread():
                sides = " · ".join(
                    f"{side} {at['min']:,} to {at['max']:,}, median {at['median']:,.0f}"
                    for side, at in spread.items()
                )
                lines.append(f"{part.name:<8} {sides}")
        sizes = [part.sizes for part in self.parts if part.sizes is not None]
        if sizes:
            total = sum(part.total for part in self.parts)
            lines.append(f"decoded  {sum(map(len, sizes)):,} of {total:,} images")
        broken = [(part.name, *one) for part in self.parts for one in part.broken]
        for part, name, reason in broken[:most]:
            line = reason if name in reason else f"{name}: {reason}"
            lines.append(f"broken   {part}: {line}")
        if len(broken) > most:
            lines.append(f"broken   … and {len(broken) - most:,} more; --json lists all")
        return lines + [f"warning  {warning}" for warning in self.warnings()]


def describe_dataset(data: Splits) -> DatasetReport:
    """Classes and counts, without decoding anything."""
    parts = []
    for name, source in data.parts.items():
        counts = np.bincount(source.targets, minlength=len(source.labels)).tolist()
        by_label = dict.fromkeys(data.labels, 0) | dict(zip(source.labels, counts, strict=True))
        parts.append(SplitStats(name=name, counts=by_label))
    return DatasetReport(data.name, data.labels, tuple(parts))


def check_images(
    data: Splits, *, workers: int = 0, progress: Advance | None = None
) -> DatasetReport:
    """Like `describe_dataset`, but also decodes every image."""
    described = describe_dataset(data)
    parts = [_read_part(part, data.part(part.name), workers, progress) for part in described.parts]
    return replace(described, parts=tuple(parts))


def absent_classes(parts: Sequence[SplitStats]) -> list[str]:
    """A warning for each split that lacks classes."""
    return [
        f"{part.name} has no images of {listed(labels)}; add some, or try data.split=stratified"
        for part in parts
        if (labels := [label for label, count in part.counts.items() if not count])
    ]


def _read_part(
    part: SplitStats, source: Source, workers: int, progress: Advance | None
) -> SplitStats:
    sizes, broken = np.zeros((len(source.targets), 2), dtype=np.int32), {}
    blank = np.zeros(len(source.targets), dtype=bool)
    for index, result in read_all(source, _measure, workers=workers, progress=progress):
        if isinstance(result, Broken):
            broken[index] = result
        else:
            *sizes[index], blank[index] = result
    readable = sizes[:, 0] > 0
    small = readable & (sizes.min(1) < _SMALL)
    names = source.names
    return replace(
        part,
        sizes=sizes[readable],
        broken=tuple(broken[index] for index in sorted(broken)),
        small=tuple(names[index] for index in np.flatnonzero(small).tolist()),
        blank=tuple(names[index] for index in np.flatnonzero(blank).tolist()),
    )


def _measure(image: Image.Image) -> tuple[int, int, bool]:
    """Width, height, and whether it has a single color."""
    return image.width, image.height, image.getcolors(1) is not None


def show_result(result: dict[str, Any], table: bool) -> None:
    """Prints what `check_dataset` returns; the `table` of classes only if requested."""
    for part, names in result.get("split", {}).items():
        echo("\n".join(f"{part}\t{name}" for name in names))
    if table:
        show_report(result["check"])
    if "duplicates" in result:
        echo("\n".join(result["duplicates"].lines()))
    if "kept" in result:
        echo(
            f"kept {result['kept']:,} training images, "
            f"removed {result['removed']:,} with duplicates elsewhere"
        )
    for name, reason in result.get("pack", ()):
        echo(f"left out  {name}: {reason}")
    for what in ("report", "filtered", "sheet"):
        if what in result:
            echo(f"{what}  {result[what]}")


def show_report(report: DatasetReport) -> None:
    """Prints counts, classes, sizes and warnings."""
    counts = " · ".join(f"{part.total:,} {part.name}" for part in report.parts)
    echo(f"{report.name}  {counts} · {len(report.labels):,} classes\n")
    print_table(*report.rows())
    if lines := report.lines():
        echo("\n" + "\n".join(lines))
