"""A folder with weights, config and model card that timm or transformers load from the hub."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from vitrail.console import say
from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import FailureError, VitrailError, one_line
from vitrail.files import make_folder, write_json
from vitrail.model import Architecture, Classifier
from vitrail.model.variants import variant_name
from vitrail.model.vit import ViTArchitecture
from vitrail.runs import Run, find_run, is_run
from vitrail.weights.convert import Parity, convert
from vitrail.weights.load import load, resolve

Library = Literal["timm", "transformers"]
_FILES = ["README.md", "config.json", "model.safetensors", "preprocessor_config.json"]
_MAX_CLASSES = 50
"""Class names and rows of the class table on the model card."""
_SNIPPETS = {
    "timm": """import timm

model = timm.create_model("{where}", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
""",
    "transformers": """from transformers import pipeline

classify = pipeline("image-classification", model="{where}")
print(classify("photo.jpg"))
""",
}


def export_hub(
    model: str | Path, folder: Path, *, to: Library = "timm", upload: str = ""
) -> Parity:
    """Write weights, config and model card, compare with the original, and upload if requested."""
    api = _logged_in() if upload else None
    if folder.exists() and (not folder.is_dir() or is_run(folder)):
        raise VitrailError(f"{folder} is a file or a run; choose a new folder")
    make_folder(folder)
    parity = convert(model, folder, to="huggingface" if to == "transformers" else "timm")
    loaded = load(model)
    if to == "timm":
        _complete_timm_config(folder / "config.json", loaded.architecture)
    _write_card(folder, loaded, find_run(resolve(model)[0]), to, upload)
    if parity.holds and api is not None:
        _upload_folder(api, folder, upload)
    elif parity.holds and _has_token():
        say("next    check its README.md, then run this again with --upload OWNER/NAME")
    return parity


def _has_token() -> bool:
    if find_spec("huggingface_hub") is None:
        return False
    from huggingface_hub import get_token

    return get_token() is not None


def _complete_timm_config(path: Path, a: Architecture) -> None:
    """Add the GELU: `vitrail convert` leaves it to timm's model, but a repository must name it."""
    config = json.loads(path.read_text(encoding="utf-8"))
    if "architecture" not in config:
        raise VitrailError(
            f"timm has no name for {variant_name(a)}; use --to transformers, or vitrail convert"
        )
    if isinstance(a, ViTArchitecture):
        config["model_args"]["act_layer"] = "gelu_tanh" if a.gelu == "tanh" else "gelu"
    write_json(path, config)


def _logged_in() -> Any:
    """The hub's API, if the user is logged in."""
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError
    except ImportError:
        raise VitrailError("--upload needs the hub extra: pip install 'vitrail[hub]'") from None
    api = HfApi()
    try:
        api.whoami()
    except LocalTokenNotFoundError:
        raise VitrailError("--upload: you are not logged in; run 'hf auth login'") from None
    except (HfHubHTTPError, OSError) as error:
        raise FailureError(
            f"the hub rejected your login ({one_line(error)}); run 'hf auth login' again"
        ) from None
    return api


def _upload_folder(api: Any, folder: Path, repository: str) -> None:
    """Upload the exported files; other files in the folder stay private."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        api.create_repo(repository, exist_ok=True)
        api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            allow_patterns=_FILES,
            commit_message="Model exported by Vitrail",
        )
    except HFValidationError as error:
        raise VitrailError(f"--upload {repository}: {one_line(error)}") from None
    except (HfHubHTTPError, OSError) as error:
        raise FailureError(f"cannot upload to {repository} ({one_line(error)})") from None


def _write_card(
    folder: Path, model: Classifier, run: Run | None, library: Library, upload: str
) -> None:
    """README.md of the repository, with the YAML header that the hub reads."""
    where = upload or str(folder)
    if library == "timm":
        where = f"hf-hub:{upload}" if upload else f"local-dir:{folder}"
    test = {} if run is None else run.evaluation("test")
    info = {} if run is None else run.info()
    parts = [
        _card_header(model, test, library),
        f"# {(upload or folder.name).rpartition('/')[2]}",
        _card_summary(model, info.get("data", {}).get("name", "")),
        *_card_results(test),
        "## Use\n\n```python\n" + _SNIPPETS[library].format(where=where) + "```",
        "Or with Vitrail, including class names and preprocessing: "
        f'`vitrail.load("{upload and "hub:"}{upload or folder}")`.',
        _card_preprocessing(model.preprocess),
        _card_training(info),
    ]
    (folder / "README.md").write_text("\n\n".join(filter(None, parts)) + "\n", encoding="utf-8")


def _card_header(model: Classifier, test: dict[str, Any], library: Library) -> str:
    values: dict[str, Any] = {
        "library_name": library,
        "pipeline_tag": "image-classification",
        "tags": ["image-classification", "vision", "vitrail"],
    }
    if test:
        dataset = {"name": Path(test["data"]).name, "type": "imagefolder", "split": "test"}
        metric = {"type": "accuracy", "name": "top-1", "value": round(test["top1"], 4)}
        task = {"type": "image-classification"}
        results = [{"task": task, "dataset": dataset, "metrics": [metric]}]
        values["model-index"] = [{"name": variant_name(model.architecture), "results": results}]
    # JSON is YAML, and needs no package to write.
    lines = [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
    return "\n".join(["---", *lines, "---"])


def _card_summary(model: Classifier, data: str) -> str:
    a = model.architecture
    count = sum(x.numel() for x in model.parameters())
    trained = f", trained on {data}" if data else ""
    summary = (
        f"{variant_name(a)}, {count:,} parameters, for {a.size[0]} × {a.size[1]} images{trained}. "
    )
    if not a.classes:
        return summary + "It has no classes: its output is features."
    names = ", ".join(model.labels[:_MAX_CLASSES]) + (" …" if model.labels[_MAX_CLASSES:] else "")
    return summary + f"It has {a.classes:,} classes{f': {names}' if names else ''}."


def _card_results(test: dict[str, Any]) -> list[str]:
    if not test:
        return ["## Results\n\nNot evaluated on a held-out test set."]
    low, high = test["intervals"]["top1"]
    classes = test["per_class"]
    top5 = f", top-5 {test['top5']:.2%}" if len(classes) > 5 else ""
    results = (
        f"## Results\n\nTop-1 {test['top1']:.2%} (95% interval {low:.2%} to {high:.2%}){top5} "
        f"on the test split of {Path(test['data']).name}, n = {test['n']:,}; calibration error "
        f"{test['ece']:.3f}."
    )
    if len(classes) > _MAX_CLASSES:
        return [results]
    rows = ["| class | precision | recall | F1 | n |", "|---|--:|--:|--:|--:|"]
    for row in classes:
        figures = " | ".join(f"{100 * row[key]:.1f}%" for key in ("precision", "recall", "f1"))
        rows.append(f"| {row['name']} | {figures} | {row['n']:,} |")
    return [results, "\n".join(rows)]


def _card_preprocessing(preprocess: Any) -> str:
    if not isinstance(preprocess, Preprocessing):
        return ""
    p, (rows, columns) = preprocess, preprocess.size
    crop = f"{p.short_side} pixels on the short side, center-cropped to " if p.short_side else ""
    return (
        f"Images are resized ({p.interpolation}) to {crop}{rows} × {columns} pixels, scaled to "
        f"[0, 1] and normalized with mean {list(p.mean)} and standard deviation {list(p.std)}."
    )


def _card_training(info: dict[str, Any]) -> str:
    if not info:
        return ""
    facts = [info.get("hardware", ""), f"seed {info.get('seed')}", f"{info.get('steps')} steps"]
    facts += [f"{package} {version}" for package, version in info.get("versions", {}).items()]
    command = f"```sh\n{info.get('command', '')}\n```"
    return f"## Training\n\n{command}\n\n{' · '.join(filter(None, facts))}"
