"""`vitrail inspect`, and the short inspection that goes into the folder of a run."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitrail.console import Advance, count_progress, echo
from vitrail.data.dataset import Source
from vitrail.data.sheets import sample_evenly
from vitrail.devices import setup_devices
from vitrail.errors import VitrailError
from vitrail.files import make_folder, write_text
from vitrail.inspection.images import resized, row
from vitrail.inspection.pages import (
    image_panels,
    model_panels,
    write_image_page,
    write_model_page,
    write_png,
)
from vitrail.inspection.tracer import ImageInput, ImageTrace, Tracer, mean_distances
from vitrail.model import Classifier
from vitrail.model.classifier import as_size
from vitrail.weights.load import load

SUMMARY_SECONDS = 5.0
"""No further image is begun after this: a report must not keep people waiting."""
_SUMMARY_SHOWN, _SUMMARY_AVERAGED = 6, 64
"""Images in the report, and images that attention distance is averaged over."""
_SUMMARY_HEIGHT = 176
_MODEL_FILES = ("model", "filters", "positions", "attention-distance")


def inspect(
    model: str | Path | Classifier,
    images: ImageInput | Sequence[ImageInput] = (),
    *,
    out: str | Path,
    layers: Sequence[int] | None = None,
    size: int | tuple[int, int] | None = None,
    target: str | int | None = None,
    device: str = "auto",
) -> dict[str, Any]:
    """Draw filters, positions, attention distance, rollout and features into the folder `out`.

    Returns the numbers, which are also in its inspection.json. `layers`, counted from 0 or back
    from -1, are those whose heads are drawn; `target` is the class of gradient-weighted rollout,
    by default the predicted one. Images that cannot be read are listed and left out; if none can be
    read, that is an error.
    """
    out = Path(out)
    named = _named([images] if isinstance(images, ImageInput) else images)
    loaded = model if isinstance(model, Classifier) else load(model, size=size)
    pixels = None if size is None else as_size(size)
    tracer = Tracer(loaded, layers=layers, size=pixels, target=target)
    _refuse_overwriting(named, out)
    with (
        setup_devices(device, "float32") as where,
        count_progress("inspecting", where.main) as advance,
    ):
        loaded.to(where.device)
        rows, broken, distances = _inspect_images(tracer, named, out, advance)
        mean = mean_distances(distances)
        result = tracer.to_dict() | {
            "attention_distance": mean,
            "images": rows,
            "broken": broken,
            "absent": tracer.absent(),
            "files": write_model_page(tracer, mean, out),
        }
    _write_result(result, out)
    return result


def _inspect_images(
    tracer: Tracer, named: dict[str, ImageInput], out: Path, advance: Advance
) -> tuple[list[dict[str, Any]], list[list[str]], list[list[dict[str, Any]]]]:
    """The pages of all images; returns their rows, those that are broken, and the distances."""
    rows, broken, distances = [], [], []
    preprocess = tracer.preprocess if named else None
    for name, image in named.items():
        assert preprocess is not None
        try:
            pixels = preprocess(image)
        except VitrailError as error:
            broken.append([name, str(error)])
            if len(broken) == len(named):
                raise
            continue
        trace = tracer.trace(pixels, name)
        distances.append(trace.distances())
        rows.append(trace.to_dict() | {"files": write_image_page(trace, tracer, out)})
        advance(1, len(named))
    return rows, broken, distances


def _named(images: Sequence[ImageInput]) -> dict[str, ImageInput]:
    """The images by unique file names."""
    named: dict[str, ImageInput] = {}
    for number, image in enumerate(images, 1):
        stem = Path(image).stem if isinstance(image, (str, Path)) else f"picture-{number}"
        name, again = stem, 1
        while name in named or name in _MODEL_FILES:
            again += 1
            name = f"{stem}-{again}"
        named[name] = image
    return named


def _refuse_overwriting(named: dict[str, ImageInput], out: Path) -> None:
    written = {(out / f"{name}.png").resolve() for name in (*named, *_MODEL_FILES)}
    for image in named.values():
        if isinstance(image, (str, Path)) and Path(image).resolve() in written:
            raise VitrailError(f"{image} would be overwritten; choose another folder with --out")


def _write_result(result: dict[str, Any], folder: Path) -> None:
    write_text(folder / "inspection.json", json.dumps(result, ensure_ascii=False, indent=1) + "\n")


def show(result: dict[str, Any]) -> None:
    """Attention distances and the paths of the pages, for a terminal."""
    echo(result["model"])
    for layer in (result["attention_distance"] or {"layers": ()})["layers"]:
        heads = "  ".join(f"{pixels:6.1f}" for pixels in layer["heads"])
        uniform = f"uniform attention would give {layer['uniform']:.1f} px"
        echo(f"layer {layer['layer']:>2}  {heads}  px; {uniform}")
    for what, reason in result["absent"].items():
        echo(f"no {what}: {reason}")
    for files in (result["files"], *(image["files"] for image in result["images"])):
        echo(files["page"])


def summarize(
    model: Classifier, source: Source, split: str, folder: Path, seconds: float = SUMMARY_SECONDS
) -> dict[str, Any]:
    """A short inspection for the report of a run: a few images of `source`, in a few seconds."""
    tracer = Tracer(model)
    preprocess = tracer.preprocess
    make_folder(folder)
    for old in folder.glob("picture-*.jpg"):
        old.unlink()
    images, distances = [], []
    shown = sample_evenly(source, _SUMMARY_SHOWN, seed=0)
    averaged = [i for i in sample_evenly(source, _SUMMARY_AVERAGED, seed=1) if i not in shown]
    began = time.monotonic()
    for index in shown + averaged:
        # A busy machine has more time for the images that are shown.
        limit = seconds if len(images) == _SUMMARY_SHOWN else 3 * seconds
        if images and time.monotonic() - began > limit:
            break
        try:
            pixels = preprocess(source.image(index))
        except VitrailError:
            continue  # the evaluation lists broken images
        trace = tracer.trace(pixels, source.names[index])
        distances.append(trace.distances())
        if len(images) < _SUMMARY_SHOWN:
            images.append(trace.to_dict() | {"truth": source.labels[source.targets[index]]})
            _write_strip(trace, folder / f"picture-{len(images)}.jpg")
        elif trace.attention is None:
            break  # nothing more to average
    result = tracer.to_dict() | {
        "split": split,
        "attention_distance": mean_distances(distances),
        "images": images,
        "absent": tracer.absent(),
    }
    for name, panel in model_panels(tracer).items():
        write_png(panel.image, folder / f"{name}.png")
    _write_result(result, folder)
    return result


def _write_strip(trace: ImageTrace, path: Path) -> None:
    """The image, its maps and its features side by side, without captions: the report has them."""
    panels = image_panels(trace)
    names = [name for name in ("picture", "rollout", "gradient", "features") if name in panels]
    strip = row([resized(panels[name].image, _SUMMARY_HEIGHT) for name in names], 6)
    strip.save(path, "JPEG", quality=86)
