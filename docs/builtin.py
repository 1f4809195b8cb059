"""Copies a run into the package as the built-in model.

python docs/builtin.py runs/cifar10-small

The result is an ordinary run folder without checkpoints, without the report (`vitrail report
builtin` writes it) and without images of the data, which may not be redistributed.
"""

import json
import shlex
import shutil
import sys
from pathlib import Path

from vitrail.runs import Run
from vitrail.weights.hub import fetch
from vitrail.weights.published import BUILTIN

KEPT = ("config.toml", "run.json", "metrics.jsonl", "model.safetensors")
DRAWN = ("filters.png", "positions.png")
"""Drawings of the weights, not images of the data."""


def pack(source: Path, target: Path) -> None:
    """Copies the files of a run, without images of the data."""
    shutil.rmtree(target, ignore_errors=True)
    (target / "inspection").mkdir(parents=True)
    for name in (*KEPT, *(f"inspection/{name}" for name in DRAWN)):
        shutil.copyfile(source / name, target / name)
    run = Run(target)
    made = shlex.join(["vitrail", "train", run.info()["recipe"], *run.info()["changed"]])
    run.update(name=BUILTIN.name, command=made)
    result = Run(source).evaluation("test")
    run.write_evaluation("test", result | {"mistakes": []})
    looked = json.loads((source / "inspection" / "inspection.json").read_text(encoding="utf-8"))
    text = json.dumps(looked | {"images": []}) + "\n"
    (target / "inspection" / "inspection.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    pack(Path(sys.argv[1]), fetch(BUILTIN.source))
