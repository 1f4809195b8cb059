"""The model card: what a stranger should know about the weights, made of what was measured."""

import json
from pathlib import Path
from typing import Any

from vitrail.data.preprocessing import Preprocessing
from vitrail.model import Classifier
from vitrail.model.variants import name
from vitrail.runs import Run

MOST_CLASSES = 50
"""A table of more would bury the rest of the card."""
SNIPPETS = {
    "timm": """import timm

model = timm.create_model("{where}", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
""",
    "transformers": """from transformers import pipeline

classify = pipeline("image-classification", model="{where}")
print(classify("photo.jpg"))
""",
}


def write_card(folder: Path, model: Classifier, run: Run | None, library: str, upload: str) -> None:
    """README.md of a repository, with its header for the hub."""
    where = upload or str(folder)
    if library == "timm":
        where = f"hf-hub:{upload}" if upload else f"local-dir:{folder}"
    parts = [
        header(model, run, library),
        f"# {(upload or folder.name).rpartition('/')[2]}",
        introduction(model, run),
        *results(run),
        "## Use\n\n```python\n" + SNIPPETS[library].format(where=where) + "```",
        "Or with Vitrail, which keeps the class names and the "
        f'preprocessing: `vitrail.load("{upload and "hub:"}{upload or folder}")`.',
        preprocessing(model.preprocess),
        *origin(run),
    ]
    (folder / "README.md").write_text("\n\n".join(filter(None, parts)) + "\n", encoding="utf-8")


def header(model: Classifier, run: Run | None, library: str) -> str:
    """What the hub reads. JSON is YAML, and needs no package to write."""
    values: dict[str, Any] = {
        "library_name": library,
        "pipeline_tag": "image-classification",
        "tags": ["image-classification", "vision", "vitrail"],
    }
    tested = {} if run is None else run.evaluation("test")
    if tested:
        metric = {"type": "accuracy", "name": "top-1", "value": round(tested["top1"], 4)}
        values["model-index"] = [
            {
                "name": name(model.architecture),
                "results": [
                    {
                        "task": {"type": "image-classification"},
                        "dataset": {
                            "name": Path(tested["data"]).name,
                            "type": "imagefolder",
                            "split": "test",
                        },
                        "metrics": [metric],
                    }
                ],
            }
        ]
    lines = [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
    return "\n".join(["---", *lines, "---"])


def introduction(model: Classifier, run: Run | None) -> str:
    """What it is, in two sentences."""
    a = model.architecture
    count = sum(x.numel() for x in model.parameters())
    data = "" if run is None else run.info().get("data", {}).get("name", "")
    told = f"{name(a)}, {count:,} parameters, for pictures of {a.size[0]} × {a.size[1]} pixels"
    learned = f", trained on {data}" if data else ""
    names = ", ".join(model.labels[:MOST_CLASSES]) + (" …" if model.labels[MOST_CLASSES:] else "")
    classes = f"It tells {a.classes:,} classes apart{f': {names}' if names else ''}."
    return f"{told}{learned}. {classes if a.classes else 'It has no classes: it gives features.'}"


def results(run: Run | None) -> list[str]:
    """What the run measured on images that nothing was chosen on."""
    tested = {} if run is None else run.evaluation("test")
    if not tested:
        return ["## Results\n\nNothing was measured on held-out images."]
    low, high = tested["intervals"]["top1"]
    rows = ["| class | precision | recall | F1 | n |", "|---|--:|--:|--:|--:|"]
    for one in tested["per_class"]:
        figures = " | ".join(f"{100 * one[key]:.1f} %" for key in ("precision", "recall", "f1"))
        rows.append(f"| {one['name']} | {figures} | {one['n']:,} |")
    top5 = f", top-5 {tested['top5']:.2%}" if len(tested["per_class"]) > 5 else ""
    figures = (
        f"## Results\n\nTop-1 {tested['top1']:.2%} (95 % interval {low:.2%} to {high:.2%}){top5} "
        f"on the test part of {Path(tested['data']).name}, n = {tested['n']:,}; calibration error "
        f"{tested['ece']:.3f}."
    )
    return [figures] if len(rows) > MOST_CLASSES + 2 else [figures, "\n".join(rows)]


def preprocessing(pre: Any) -> str:
    """How pictures are made ready, for those who do it by hand."""
    if not isinstance(pre, Preprocessing):
        return ""
    rows, columns = pre.size
    cut = f"to a short side of {pre.short_side}, then the center of " if pre.short_side else "to "
    return (
        f"Pictures are resized ({pre.interpolation}) {cut}{rows} × {columns} pixels, scaled to "
        f"0…1, less {list(pre.mean)}, divided by {list(pre.std)}."
    )


def origin(run: Run | None) -> list[str]:
    """The command that makes it again."""
    if run is None:
        return []
    info = run.info()
    told = [info.get("hardware", ""), f"seed {info.get('seed')}", f"{info.get('steps')} steps"]
    told += [f"{key} {value}" for key, value in info.get("versions", {}).items()]
    command = f"```sh\n{info.get('command', '')}\n```"
    return [f"## How it was made\n\n{command}\n\n{' · '.join(filter(None, told))}"]
