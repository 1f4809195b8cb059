"""What `vitrail data` does: look at a data set, and write what is asked for."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vitrail.console import count_progress
from vitrail.data import check as checking
from vitrail.data.check import sheet as contact_sheet
from vitrail.data.dataset import Splits
from vitrail.data.opening import open_original
from vitrail.data.store import pack_data
from vitrail.errors import VitrailError
from vitrail.files import replace_with, write_text
from vitrail.settings import build, changed, parse, put, with_settings
from vitrail.training.resolve import Settings
from vitrail.training.train import open_parts


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """What `vitrail data` is to do beside counting."""

    check: bool = False
    """Decode every picture."""
    duplicates: bool = False
    against: tuple[str, ...] = ()
    """Other DATA to look for duplicates in."""
    mirrored: bool = False
    """Whether a mirror image is a duplicate, too."""
    report: str = ""
    """Where a page about the duplicates goes."""
    filtered: str = ""
    """Where the names of train go that do not come back elsewhere."""
    sheet: bool = False
    pack: str = ""
    """Where the store goes; without what comes back in the other DATA."""
    split: bool = False
    workers: int = 0


def inspect_dataset(
    what: str | Path, options: CheckOptions, settings: Settings = ()
) -> dict[str, Any]:
    """What a data set holds and what is wrong with it: one entry for each thing that was asked."""
    pairs = list(settings.items()) if isinstance(settings, Mapping) else map(parse, settings)
    values: dict[str, Any] = {}
    for name, value in [("data.source", str(what)), *pairs]:
        put(values, name, value)
    about_duplicates = options.report or options.filtered or options.mirrored
    if about_duplicates and not (options.duplicates or options.against):
        raise VitrailError(
            "--report, --filtered and --mirrored need --duplicates or --against DATA"
        )
    config = build(values)
    brought = open_original(what, unlabeled=config.train.objective == "masked")
    data = whole = open_parts(config, changed(config), brought)
    if options.pack:
        # A store is split when it is opened, as the data itself would be.
        undivided = with_settings(config, data__val=0.0, data__test=0.0)
        whole = open_parts(undivided, brought=brought)
    result: dict[str, Any] = {}
    with count_progress(f"reading {data.name}") as advance:
        if options.check:
            result["check"] = checking.check(data, workers=options.workers, progress=advance)
        else:
            result["check"] = checking.describe(data)
        if options.duplicates or options.against:
            from vitrail.duplicates import find as duplicates

            result["duplicates"] = duplicates.find(
                whole,
                against=[open_original(other) for other in options.against],
                inside=options.duplicates,
                alike=duplicates.Alike(mirrored=options.mirrored),
                workers=options.workers,
                progress=advance,
            )
    result |= kept_of(whole, options, result.get("duplicates"))
    if options.sheet:
        target = Path(f"{Path(data.name).name or 'data'}-sheet.jpg")
        drawn = contact_sheet(data.part("train"))
        replace_with(target, lambda part: drawn.save(part, format="JPEG", quality=88))
        result["sheet"] = str(target)
    if options.split:
        result["split"] = {name: list(part.names) for name, part in data.parts.items()}
    return result


def kept_of(data: Splits, options: CheckOptions, found: Any) -> dict[str, Any]:
    """What is written of a data set once it is known what lies in it twice."""
    result: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    if found is not None and options.report:
        from vitrail.reporting import duplicates as duplicates_page

        result["report"] = str(duplicates_page.write(found, Path(options.report)))
    if found is not None and (options.filtered or options.against):
        from vitrail.duplicates import find as duplicates

        kept, _ = duplicates.without(data, found)
        left_out = duplicates.reasons(found)
        result["kept"], result["removed"] = len(kept.targets), len(left_out)
        if options.filtered:
            write_text(Path(options.filtered), "".join(f"{name}\n" for name in kept.names))
            result["filtered"] = options.filtered
        if options.against:
            data = replace(data, train=kept)
    if options.pack:
        with count_progress(f"packing {data.name}") as advance:
            broken = pack_data(data, Path(options.pack), progress=advance)
        result["pack"] = [*broken, *(left_out.items() if options.against else ())]
    return result
