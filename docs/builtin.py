"""Puts what a run learned into the package, as the built-in model.

python docs/builtin.py runs/cifar10-small

The folder is a run like any other, but for what a user of the weights does not need: the state to
resume from, the page, which `vitrail report builtin` makes, and every picture of the data, which is
not ours to give away.
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
"""Pictures of the weights, not of the data."""


def pack(source: Path, target: Path) -> None:
    """The run's files, without pictures of the data."""
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
