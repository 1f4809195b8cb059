"""Does a change of the code leave the numbers alone? Another commit and this tree, to the bit.

    python benchmarks/golden.py BASE [--only NAME ...]

checks BASE out beside this tree and runs the same commands from both, in one environment on one
thread of the CPU: short runs of several models, objectives and optimizers, `evaluate` and
`predict`. Losses, weights and predictions must be equal to the last bit. Exits with 1 where they
are not.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

ROOT = Path(__file__).parents[1]
SMALL = ("model.width=32", "model.depth=2", "model.heads=2", "model.mlp=64", "train.batch=32")
SHORT = ("train.steps=20", "train.evaluations=2", "optim.warmup=4", "system.log_steps=1")

# Name -> words after `vitrail train`; {out} is the folder of all runs, in which "vit" comes first.
RUNS: dict[str, tuple[str, ...]] = {
    "vit": ("digits/vit", *SHORT),
    "sgd": ("digits/vit", *SMALL, *SHORT, "optim.name=sgd", "optim.lr=0.03"),
    "adam": ("digits/vit", *SMALL, *SHORT, "optim.name=adam"),
    "lamb": ("digits/vit", *SMALL, *SHORT, "optim.name=lamb"),
    "muon": ("digits/vit", *SMALL, *SHORT, "optim.name=muon", "optim.momentum=0.95"),
    "sigmoid": ("digits/vit", *SMALL, *SHORT, "train.objective=sigmoid", "model.dropout=0.1"),
    "accumulated": ("digits/vit", *SMALL, *SHORT, "system.microbatch=12", "model.drop_path=0.1"),
    "masked": ("cifar10/masked", "data.source=digits", "data.size=16", *SMALL, *SHORT,
               "system.compile=false", "system.graphs=false"),
    "frozen": ("finetune/folder", "data.source=digits", "data.size=8", "model.init={out}/vit",
               "train.freeze=true", *SHORT),
    "finetuned": ("finetune/folder", "data.source=digits", "data.size=16", "model.init={out}/vit",
                  "train.batch=32", *SHORT),
    "hybrid": ("digits/vit", "model.variant=R26+Ti/32", "data.size=64", *SMALL[1:],
               "model.width=32", "train.steps=3", *SHORT[1:], "train.batch=8", "data.subset=64"),
    "bit": ("digits/vit", "model.variant=R26x1", "model.width=0", "model.depth=0",
            "model.heads=0", "model.mlp=0", "model.pool=", "model.positions=", "data.size=32",
            "train.steps=3", *SHORT[1:], "train.batch=8", "data.subset=64"),
}  # fmt: skip

EVALUATED = ("vit", "sigmoid", "frozen", "hybrid", "bit")


@contextmanager
def checked_out(base: str) -> Iterator[Path]:
    """Another commit in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "base"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), base], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def vitrail(tree: Path, cache: Path, *words: str) -> str:
    """What a command of one of the trees prints."""
    environment = os.environ | {
        "PYTHONPATH": str(tree),
        "OMP_NUM_THREADS": "1",
        "VITRAIL_CACHE": str(cache),
    }
    command = [sys.executable, "-m", "vitrail", *words]
    done = subprocess.run(command, cwd=cache, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{tree.name}: vitrail {' '.join(words)}\n{done.stderr}")
    return done.stdout


def numbers(text: str) -> list[Any]:
    """The events of a run without what depends on the clock."""
    clocks = ("seconds", "images_per_second", "mfu", "input_wait", "balanced_accuracy")
    events = [json.loads(line) for line in text.splitlines()]
    return [{k: v for k, v in event.items() if k not in clocks} for event in events]


def result(tree: Path, place: Path, name: str) -> dict[str, Any]:
    """Everything about one run that may not change."""
    out = place / name
    words = [word.format(out=place) for word in RUNS[name]]
    vitrail(tree, place, "train", *words, "--out", str(out), "--device", "cpu")
    found: dict[str, Any] = {"weights": load_file(out / "model.safetensors")}
    found["events"] = numbers((out / "metrics.jsonl").read_text())
    if name in EVALUATED:
        words = ["evaluate", str(out), "digits", "--split", "test", "--json", "--device", "cpu"]
        evaluated = json.loads(vitrail(tree, place, *words))
        found["evaluated"] = {key: evaluated[key] for key in ("top1", "loss", "n", "confusion")}
        image = str(ROOT / "docs" / "images" / "flower.jpg")
        found["predicted"] = vitrail(tree, place, "predict", str(out), image, "--json")
    return found


def difference(a: dict[str, Any], b: dict[str, Any]) -> str:
    """What two results differ in; empty where they are equal."""
    one, two = a["weights"], b["weights"]
    wrong = sorted(one.keys() ^ two.keys())
    wrong += [key for key in one.keys() & two.keys() if not one[key].equal(two[key])]
    other = [key for key in a.keys() - {"weights"} if a[key] != b[key]]
    return ", ".join(other + wrong[:3])


def main() -> None:
    """Runs everything from both trees."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base")
    parser.add_argument("--only", nargs="+", choices=[*RUNS], default=[*RUNS])
    args = parser.parse_args()
    names = [name for name in RUNS if name in args.only or name == "vit"]
    failed = []
    with tempfile.TemporaryDirectory() as folder, checked_out(args.base) as base:
        places = {base: Path(folder) / "base", ROOT: Path(folder) / "here"}
        for place in places.values():
            place.mkdir()
        for name in names:
            before, now = (result(tree, place, name) for tree, place in places.items())
            differs = difference(before, now)
            print(f"{name:12} {'differs: ' + differs if differs else 'equal'}", flush=True)
            failed += [name] * bool(differs)
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
