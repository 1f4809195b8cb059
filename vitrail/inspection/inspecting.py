"""A model and pictures → a folder of pictures of what lies inside, and the numbers behind them."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vitrail.console import Advance, count_progress
from vitrail.devices import devices
from vitrail.errors import VitrailError
from vitrail.files import write_text
from vitrail.inspection.drawing import draw, draw_model
from vitrail.inspection.looking import Distances, Inspector, Look, Picture, inspector, rounded
from vitrail.inspection.structure import Similarity, filters
from vitrail.model import Classifier
from vitrail.model.classifier import as_size
from vitrail.weights.load import load

OWN = {"model", "filters", "positions", "attention-distance"}
"""Names of files that are the model's."""


def inspect(
    model: str | Path | Classifier,
    images: Picture | Sequence[Picture] = (),
    *,
    out: str | Path,
    layers: Sequence[int] | None = None,
    size: int | tuple[int, int] | None = None,
    target: str | int | None = None,
    device: str = "auto",
) -> dict[str, Any]:
    """Filters, positions, attention distance, rollout and features as pictures in a folder.

    `layers`, counted from 0 or back from -1, are those whose heads are shown; `target` is the class
    of gradient-weighted rollout, the model's own answer by default.
    """
    pictures = [images] if isinstance(images, Picture) else list(images)
    loaded = model if isinstance(model, Classifier) else load(model, size=size)
    asked = inspector(
        loaded, layers=layers, size=None if size is None else as_size(size), target=target
    )
    with devices(device, "float32") as where, count_progress("inspecting", where.main) as advance:
        loaded.to(where.device)
        return inspect_images(asked, pictures, Path(out), advance)


def inspect_images(
    asked: Inspector, pictures: Sequence[Picture], out: Path, progress: Advance | None = None
) -> dict[str, Any]:
    """Everything into a folder; returns the numbers, which are in its inspection.json too.

    A picture that cannot be read is named and left out; it is an error if none is left.
    """
    if pictures:
        asked.check()
    refuse_overwriting(pictures, out)
    distances, images, broken = Distances(), [], []
    for name, picture in named(pictures):
        try:
            pixels = asked.pixels(picture)
        except VitrailError as error:
            broken.append([name, str(error)])
            if len(broken) == len(pictures):
                raise
            continue
        one = asked.look(pixels, name)
        distances.add(one)
        images.append(described(one) | {"files": draw(one, asked, out)})
        if progress is not None:
            progress(1, len(pictures))
    result = about(asked) | {
        "attention_distance": distances.to_dict(),
        "images": images,
        "broken": broken,
        "absent": asked.absent(),
        "files": draw_model(asked, distances, out),
    }
    write_text(out / "inspection.json", json.dumps(result, ensure_ascii=False, indent=1) + "\n")
    return result


def refuse_overwriting(pictures: Sequence[Picture], out: Path) -> None:
    """Nobody's photograph may make room for a picture of it."""
    pages = {(out / f"{name}.png").resolve() for name, _ in named(pictures)}
    pages |= {(out / f"{name}.png").resolve() for name in OWN}
    for picture in pictures:
        if isinstance(picture, (str, Path)) and Path(picture).resolve() in pages:
            raise VitrailError(f"{picture} would be overwritten; choose another folder with --out")


def named(pictures: Sequence[Picture]) -> Iterator[tuple[str, Picture]]:
    """Each picture with a name that no other has."""
    used = set(OWN)
    for number, picture in enumerate(pictures, 1):
        stem = Path(picture).stem if isinstance(picture, (str, Path)) else f"picture-{number}"
        name, again = stem, 1
        while name in used:
            again += 1
            name = f"{stem}-{again}"
        used.add(name)
        yield name, picture


def about(asked: Inspector) -> dict[str, Any]:
    """What can be said of the model before it has seen anything."""
    found = filters(asked.model)
    positions = asked.positions()
    return {
        "model": asked.about(),
        "size": list(asked.size),
        "layers": list(asked.layers),
        "filters": {
            "of": found.of,
            "count": found.count,
            "shares": rounded(found.shares.tolist(), 5),
        },
        "positions": alike(positions) if isinstance(positions, Similarity) else None,
    }


def alike(found: Similarity) -> dict[str, Any]:
    """Mean cosine similarity of a patch with its row, its column and all others."""
    maps = found.maps.unflatten(0, (len(found.rows), len(found.columns)))
    row = maps[range(len(found.rows)), :, found.rows]
    column = maps[:, range(len(found.columns)), :, found.columns]

    def others(lines: Any) -> float | None:
        """The mean without a patch's similarity to itself."""
        patches, length = lines.numel() // lines.shape[-1], lines.shape[-1]
        if length == 1:
            return None
        return round((float(lines.sum()) - patches) / (patches * (length - 1)), 4)

    return {
        "kind": found.kind,
        "grid": list(found.maps.shape[1:]),
        "same_row": others(row),
        "same_column": others(column),
        "all": others(found.maps.flatten(1)),
    }


def described(one: Look) -> dict[str, Any]:
    """The numbers of one picture."""
    found = {"rollout": one.rollout, "gradient_rollout": one.gradient}
    return {
        "name": one.name,
        "guess": one.guess,
        "probability": round(one.probability, 4),
        "gradient_class": one.target,
        "grid": list(one.recording.grid),
        **{key: None if seen is None else rounded(seen.tolist(), 6) for key, seen in found.items()},
    }
