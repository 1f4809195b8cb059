"""A short inspection for the folder of a run: its report shows what is found here."""

import json
import time
from pathlib import Path
from typing import Any

from vitrail.data.check import drawn
from vitrail.data.dataset import Source
from vitrail.errors import VitrailError
from vitrail.files import make_folder, write_text
from vitrail.inspection.drawing import draw_parts, keep, parts
from vitrail.inspection.inspecting import about, described
from vitrail.inspection.looking import Distances, Look, inspector
from vitrail.inspection.pictures import beside, fitted
from vitrail.model import Classifier

SHOWN, MOST = 6, 64
"""Pictures on the page, and pictures that attention distance is averaged over."""
SECONDS = 5.0
"""After this no further picture is begun: a report must not keep people waiting."""
HEIGHT = 176


def summarize(
    model: Classifier, source: Source, split: str, folder: Path, seconds: float = SECONDS
) -> dict[str, Any]:
    """Filters, positions, attention distance, and rollout on a few pictures of a data part."""
    asked = inspector(model)
    asked.check()
    make_folder(folder)
    for old in folder.glob("picture-*.jpg"):
        old.unlink()
    distances, images = Distances(), []
    began = time.monotonic()
    for index in spread(source):
        if distances.n + len(images) and time.monotonic() - began > seconds:
            break
        try:
            pixels = asked.pixels(source.image(index))
        except VitrailError:
            continue  # the evaluation has named what is broken
        one = asked.look(pixels, source.names[index])
        distances.add(one)
        if len(images) < SHOWN:
            truth = source.labels[source.targets[index]]
            images.append(described(one) | {"truth": truth})
            show(one, folder / f"picture-{len(images)}.jpg")
        elif one.seen is None:
            break  # nothing more to average
    result = about(asked) | {
        "split": split,
        "attention_distance": distances.to_dict(),
        "images": images,
        "absent": asked.absent(),
    }
    for name, panel in draw_parts(asked).items():
        keep(panel.picture, folder, f"{name}.png")
    write_text(folder / "inspection.json", json.dumps(result, ensure_ascii=False, indent=1) + "\n")
    return result


def spread(source: Source) -> list[int]:
    """Pictures of as many classes as there are; those to be shown come first."""
    shown = drawn(source, SHOWN, seed=0)
    return shown + [index for index in drawn(source, MOST, seed=1) if index not in shown]


def show(one: Look, path: Path) -> None:
    """The picture, its maps and its features side by side, without words: the page has them."""
    found = parts(one)
    names = [name for name in ("picture", "rollout", "gradient", "features") if name in found]
    row = beside([fitted(found[name].picture, HEIGHT) for name in names], 6)
    row.save(path, "JPEG", quality=86)
