"""`vitrail evaluate`: the accuracy of a model on images that it was not trained on."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vitrail import runs
from vitrail.config import load_config
from vitrail.console import count_progress, require, say
from vitrail.data.dataset import Source, listed
from vitrail.data.opening import same_data
from vitrail.devices import Devices, setup_devices
from vitrail.errors import FailureError, VitrailError
from vitrail.evaluation.features import existing_cache
from vitrail.evaluation.held_out import select_images
from vitrail.evaluation.labels import with_all_classes
from vitrail.evaluation.metrics import Predictions, measure
from vitrail.evaluation.mistakes import mistakes, with_examples
from vitrail.evaluation.predictor import Predictor, predict_dataset
from vitrail.files import cache_folder
from vitrail.model import Classifier
from vitrail.weights.load import load
from vitrail.weights.published import BUILTIN


def evaluate(
    model: str | Path | Classifier,
    data: str | Path,
    *,
    split: str = "",
    labels: str = "",
    batch: int = 64,
    workers: int = -1,
    device: str = "auto",
) -> dict[str, Any]:
    """Top-1, top-5, per-class figures, confusion and calibration on every image of a split that the
    model was not trained on.

    `split` is train, val, test or all; by default test of the data that the model was trained on,
    all of a folder that it never saw. `labels` (imagenet, real, objectnet, objectnet-unmasked)
    scores an ImageNet-1k model with other labels, ObjectNet's with BiT's crop. The result of a run
    is also written to its folder.
    """
    with setup_devices(device, "auto") as devices:
        loaded = model if isinstance(model, Classifier) else load(model)
        loaded.to(devices.device).fuse(devices.device, devices.precision)
        options: dict[str, Any] = {
            "model_name": str(model) if isinstance(model, (str, Path)) else type(model).__name__,
            "batch": batch,
            "workers": workers,
        }
        if labels:
            imagenet = require("imagenet.evaluate", f"--labels {labels}")
            with count_progress("evaluating", devices.main) as advance:
                options |= {"split": split or "test", "progress": advance}
                result = imagenet.evaluate(loaded, data, labels, devices.precision, **options)
        else:
            result = _evaluate_split(loaded, data, split, devices, options)
        # The built-in model comes with its results and is not written to.
        apart = isinstance(model, Classifier) or model == BUILTIN.name
        run = None if apart else runs.find_run(Path(model))
        if run is not None and devices.main:
            _write_result(run, data, labels, result)
    return result


def _evaluate_split(
    model: Classifier, data: str | Path, split: str, devices: Devices, options: Mapping[str, Any]
) -> dict[str, Any]:
    selected = select_images(model, data, split)
    source, absent = with_all_classes(selected.source, model.labels)
    predictor = Predictor(
        model,
        source.labels,
        precision=devices.precision,
        cache=existing_cache(model, devices.precision, cache_folder()),
        data=str(data),
    )
    if devices.main:
        say(f"images   {selected.note}")
    if absent and devices.main:
        classes = len(source.labels)
        say(f"classes  {classes - len(absent)} of {classes}: {data} has no {listed(absent)}")
    with count_progress(f"evaluating {selected.split}", devices.main) as advance:
        result = evaluate_dataset(
            predictor, source, data=str(data), split=selected.split, progress=advance, **options
        )
    return result | {"left_out": selected.left_out, "absent": list(absent)}


def _write_result(run: runs.Run, data: str | Path, labels: str, result: dict[str, Any]) -> None:
    """Results on other data are written beside the run's own, not in their place."""
    trained_on = load_config(run.folder / "config.toml").data.source
    own = same_data(trained_on, data) and not labels
    other = f"{Path(str(data)).name}-{labels or result['split']}"
    try:
        run.write_evaluation(result["split"] if own else runs.run_name(other, ()), result)
    except FailureError as error:
        say(f"the result is not saved: {error}")


def evaluate_dataset(
    predictor: Predictor,
    source: Source,
    *,
    data: str,
    split: str,
    model_name: str,
    relabel: Callable[[Predictions], Predictions] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Everything that `vitrail evaluate` reports, as plain values; options are `predict_dataset`'s.

    `relabel` may change what counts as correct once the predictions are known.
    """
    start = time.perf_counter()
    predictions, skipped = predict_dataset(predictor, source, **options)
    if skipped and not len(predictions):
        name, reason = skipped[0]
        raise VitrailError(f"no image of {data} ({split}) can be read; {name}: {reason}")
    if relabel is not None:
        predictions = relabel(predictions)
    measured = measure(predictions)
    return measured | {
        "confused": with_examples(measured["confused"], predictions, source),
        "broken": [list(pair) for pair in skipped],
        "split": split,
        "data": data,
        "model": model_name,
        "mistakes": mistakes(predictions, source),
        "seconds": time.perf_counter() - start,
    }
