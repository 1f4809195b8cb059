"""The run folder: everything about one run, readable by people and by every other command.

config.toml          every setting of the run; itself a recipe
run.json             command, commit, versions, hardware, seed, times, status, cost, best score
metrics.jsonl        one JSON object per event: the only source of curves
log.txt              the terminal output
model.safetensors    the selected weights, with classes and preprocessing
weights/*            with train.keep_all: the weights of every evaluation, step-N.safetensors
last.pt              the last checkpoint: all that an exact resume needs
previous.pt          the checkpoint before it, in case last.pt is damaged
training_images.npy  a 64-bit hash of each training image, so that evaluation can leave it out
augmented.jpg        training images as the model saw them
evaluation/*.json    one per evaluated split
inspection/          what the model attends to: numbers in inspection.json, and images
report.html          all of the above on one page
"""

import itertools
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt64

from vitrail import __version__, aliases
from vitrail.config import Config, changed_settings, load_config, to_toml
from vitrail.console import escaped, say
from vitrail.errors import FailureError, VitrailError, one_line
from vitrail.files import (
    append_line,
    make_folder,
    read_json,
    read_json_lines,
    write_bytes,
    write_errors,
    write_text,
)

_LOCK = ".lock"
_KEPT = "weights"
_MAX_NAME = 120
_MAX_TITLE = 40


class BusyError(VitrailError):
    """Another process is training in the folder."""


@dataclass(frozen=True)
class Run:
    """One run folder. Of several processes, only the main one has a `Run` that `writes`."""

    folder: Path
    writes: bool = True

    @property
    def weights(self) -> Path:
        return self.folder / "model.safetensors"

    def weights_at(self, step: int) -> Path:
        """The weights that were evaluated at a step, if `train.keep_all` kept them."""
        return self.folder / _KEPT / f"step-{step}.safetensors"

    @property
    def checkpoint(self) -> Path:
        return self.folder / "last.pt"

    @property
    def previous_checkpoint(self) -> Path:
        return self.folder / "previous.pt"

    @property
    def training_images(self) -> Path:
        return self.folder / "training_images.npy"

    def has_checkpoint(self) -> bool:
        # A kill between two renames leaves only the previous one.
        return self.checkpoint.exists() or self.previous_checkpoint.exists()

    def has_inspection(self) -> bool:
        return (self.folder / "inspection" / "inspection.json").exists()

    def failed_at_start(self) -> bool:
        """Whether the run failed before there was anything to resume from."""
        return self.info().get("status") == "failed" and not self.has_checkpoint()

    def info(self) -> dict[str, Any]:
        """The contents of run.json; empty if there is none."""
        info = read_json(self.folder / "run.json")
        cost = info.get("cost")
        return info | {"cost": aliases.keys(cost)} if isinstance(cost, dict) else info

    def update(self, **values: Any) -> None:
        """Set values in run.json."""
        if self.writes:
            write_text(self.folder / "run.json", json.dumps(self.info() | values, indent=2) + "\n")

    def record_broken_images(self, reasons: Mapping[str, str]) -> None:
        """Store the names of images that could not be decoded, and why."""
        data = self.info().get("data", {})
        self.update(data={**data, "broken": sorted(reasons.items())})

    def record_training_images(self, hashes: UInt64[np.ndarray, " n"]) -> None:
        """Store which images the run trains on, by content."""
        if self.writes:
            known = np.unique(hashes[hashes > 0])
            write_bytes(self.training_images, lambda file: np.save(file, known))

    def say(self, line: str) -> None:
        """Print a line to the terminal and to log.txt."""
        if self.writes:
            say(line)
            append_line(self.folder / "log.txt", escaped(line))

    def log(self) -> str:
        """The contents of log.txt."""
        path = self.folder / "log.txt"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def log_event(self, **values: Any) -> None:
        """Append a line to metrics.jsonl."""
        if self.writes:
            append_line(self.folder / "metrics.jsonl", json.dumps(values))

    def events(self) -> list[dict[str, Any]]:
        """The contents of metrics.jsonl, without a line that a crash cut short."""
        path = self.folder / "metrics.jsonl"
        return read_json_lines(path) if path.exists() else []

    def drop_after(self, step: int) -> None:
        """Remove the events and the kept weights that a resumed run will write again."""
        if self.writes:
            for path in self.folder.glob(f"{_KEPT}/step-*.safetensors"):
                number = path.stem.removeprefix("step-")
                if number.isdecimal() and int(number) > step:
                    path.unlink()
            lines = [json.dumps(event) for event in self.events() if event.get("step", 0) <= step]
            write_text(self.folder / "metrics.jsonl", "".join(line + "\n" for line in lines))

    def write_evaluation(self, split: str, result: Mapping[str, Any]) -> Path:
        """Store the result of an evaluation."""
        path = self.folder / "evaluation" / f"{split}.json"
        if self.writes:
            make_folder(path.parent)
            write_text(path, json.dumps(result, ensure_ascii=False) + "\n")
        return path

    def evaluation(self, split: str) -> dict[str, Any]:
        """The result of an evaluation; empty if there was none."""
        return read_json(self.folder / "evaluation" / f"{split}.json")

    def score(self) -> tuple[float | None, str, int]:
        """Top-1, the split it was measured on and its size: test if evaluated, else val."""
        for split in ("test", "val"):
            if result := self.evaluation(split):
                return result.get("top1"), split, result.get("n", 0)
        best = self.info().get("best") or {}
        return best.get("top1"), "val", best.get("n", 0)

    def describe(self) -> str:
        """`a finished run (94.12%)`."""
        status = self.info().get("status", "unfinished")
        top1 = self.score()[0]
        accuracy = f" ({100 * top1:.2f}%)" if top1 is not None else ""
        return f"{'an' if status[0] in 'aeiou' else 'a'} {status} run{accuracy}"

    def _status(self) -> str:
        """What run.json says, unless the process was killed before it could change that."""
        status = self.info().get("status", "")
        if status == "running" and (self.folder / _LOCK).exists() and not is_locked(self.folder):
            return "interrupted"
        return status

    def summary(self) -> dict[str, Any]:
        """A row of `vitrail runs`."""
        info = self.info()
        top1, split, n = self.score()
        return {
            "run": str(self.folder),
            "status": self._status(),
            "top1": top1,
            "n": n,
            "split": split if top1 is not None else "",
            "parameters": info.get("model", {}).get("parameters"),
            "seconds": info.get("seconds", 0.0),
            "started": info.get("started", ""),
        }


# Finding runs


def is_run(folder: Path) -> bool:
    return (folder / "run.json").is_file() and (folder / "config.toml").is_file()


def find_run(model: Path) -> Run | None:
    """The run that a MODEL is, or whose folder it is in."""
    folder = next((folder for folder in (model, model.parent) if is_run(folder)), None)
    return None if folder is None else Run(folder)


def find_runs(root: Path, pattern: str = "**/run.json") -> list[Run]:
    """The runs below a folder, oldest first."""
    if not root.is_dir():
        return []
    runs = [Run(path.parent, writes=False) for path in root.glob(pattern) if is_run(path.parent)]
    return sorted(runs, key=lambda run: (str(run.info().get("started", "")), str(run.folder)))


def training_image_hashes(model: Path | None) -> UInt64[np.ndarray, " n"] | None:
    """Hashes of the images that a MODEL was trained on; None if they were not recorded."""
    kept = model is not None and model.parent.name == _KEPT
    run = None if model is None else find_run(model.parent if kept else model)
    if run is None or not run.training_images.exists():
        return None
    try:
        hashes = np.load(run.training_images, allow_pickle=False)
        if hashes.dtype == np.uint64 and hashes.ndim == 1:
            return hashes
        reason = "it holds something else"
    except (OSError, ValueError, EOFError) as error:
        reason = one_line(error)
    raise FailureError(
        f"{run.training_images} cannot be read ({reason}); delete it to compare images by name"
    )


# Choosing, locking and creating a folder


def data_name(source: str) -> str:
    """A short name for DATA: that of its folder, or what the names of its shards share."""
    path = Path(source).expanduser()
    resolved = path.resolve() if os.path.lexists(path) else path
    for part in reversed(resolved.parts):
        stem = re.sub(r"\.tar.*|[{\[*?].*", "", part)
        if name := re.sub(r"[^\w.-]+", "-", stem)[:_MAX_TITLE].strip("-_."):
            return name
    return "data"


def run_name(recipe: str, settings: Sequence[str]) -> str:
    """The name of a run folder: the recipe, or the data, and the settings that were changed."""
    changes = [setting for setting in settings if not setting.startswith("system.")]
    parts = [recipe, *map(_without_folders, changes)]
    name = "+".join(re.sub(r"[^\w.=-]+", "-", part).strip("-.") for part in parts)
    if len(name) > _MAX_NAME:
        name = f"{name[: _MAX_NAME - 9]}-{sha256(name.encode()).hexdigest()[:8]}"
    return name


def _without_folders(setting: str) -> str:
    """`model.init=/some/path/model.npz` as `model.init=model.npz`; `B/16-in21k` is not a path."""
    key, _, value = setting.partition("=")
    is_path = Path(value).is_absolute() or ("/" in value and Path(value).exists())
    return f"{key}={Path(value).name if is_path else value}"


def numbered_folders(folder: Path) -> Iterator[Path]:
    """NAME, NAME-2, NAME-3, …"""
    yield folder
    for number in itertools.count(2):
        yield folder.with_name(f"{folder.name}-{number}")


def is_occupied(folder: Path) -> bool:
    """Whether a folder holds anything that a new run would overwrite or mix with."""
    if not folder.is_dir():
        return folder.exists()
    files = (path for path in folder.iterdir() if path.name != ".lock")
    return not Run(folder).failed_at_start() and any(files)


@contextmanager
def lock_folder(folder: Path) -> Iterator[Path]:
    """Keep other processes from training in a folder until this one ends, however it ends."""
    make_folder(folder)
    try:
        import fcntl
    except ImportError:  # Windows
        yield folder
        return
    path = folder / _LOCK
    with write_errors(path):
        file = path.open("a")
    with file:
        try:
            # A lock of this process alone: its data-loading workers may outlive it for a while.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise BusyError(
                f"another process is training in {folder} right now; wait for it, or choose "
                "another folder with --out"
            ) from None
        yield folder


def is_locked(folder: Path) -> bool:
    """Whether another process is training in a folder."""
    try:
        with lock_folder(folder):
            return False
    except BusyError:
        return True


@contextmanager
def open_folder(folder: Path, numbered: bool) -> Iterator[Path]:
    """Lock a folder; `numbered` takes the first free one of NAME, NAME-2, NAME-3, …"""
    if not numbered:
        with lock_folder(folder):
            yield folder
        return
    for free in numbered_folders(folder):
        if is_occupied(free):
            continue
        with ExitStack() as stack:
            try:
                stack.enter_context(lock_folder(free))
            except BusyError:
                continue
            if not is_occupied(free):  # by a process that was faster and has ended since
                yield free
                return


def create(folder: Path, config: Config, facts: Mapping[str, Any], resume: bool) -> Run:
    """A new run folder, or the existing one to resume.

    Nothing is overwritten, except a run that failed before its first checkpoint.
    """
    run = Run(folder)
    if not resume and run.failed_at_start():
        for name in ("run.json", "metrics.jsonl", "log.txt", "augmented.jpg"):
            (folder / name).unlink(missing_ok=True)
    if (folder / "run.json").exists() and not resume:
        finished = run.info().get("status") == "finished"
        hint = "" if finished else "resume it with --resume, or "
        raise VitrailError(
            f"{folder} holds {run.describe()}; {hint}choose another folder with --out"
        )
    if (folder / "config.toml").exists() and resume:
        check_same_config(folder, config)
    make_folder(folder)
    for part in (*folder.glob(".*.part"), *folder.glob(f"{_KEPT}/.*.part")):
        part.unlink(missing_ok=True)  # what a killed session was writing
    write_text(folder / "config.toml", to_toml(config))
    if not run.info():
        run.update(name=folder.name, started=now(), seconds=0.0, best=None, **facts)
    run.update(status="running", message="", resumed=resume)
    return run


def check_same_config(folder: Path, config: Config) -> None:
    """Refuse to resume a run with other settings; only those under system and sweep may change."""
    original = load_config(folder / "config.toml")
    before, after = (
        ", ".join(one for one in settings if not one.startswith(("system.", "sweep.")))
        for settings in (changed_settings(original, config), changed_settings(config, original))
    )
    if after:
        raise VitrailError(
            f"{folder} was started with {before}, not {after}; `{resume_command(folder)}` "
            "continues it as it was, another --out starts a new run"
        )


def resume_command(folder: Path) -> str:
    """The command line that continues a run."""
    return shlex.join(["vitrail", "train", str(folder), "--resume"])


# What run.json records


def provenance(command: Sequence[str]) -> dict[str, Any]:
    """Command, code and versions that a run was made with."""
    import torch
    import torchvision

    commit, dirty = _code_version()
    return {
        "command": shlex.join(command),
        "commit": commit,
        "dirty": dirty,
        "versions": {
            "vitrail": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "torchvision": torchvision.__version__,
        },
    }


def _code_version() -> tuple[str, bool]:
    """The checkout's commit, and whether it has changes; ("", False) for an installed package."""
    root = Path(__file__).parents[1]
    if not (root / ".git").exists():
        return "", False

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", root, *words], capture_output=True, text=True)
        return done.stdout.strip()

    try:
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain"))
    except OSError:
        return "", False


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def command_line() -> list[str]:
    """The command that started this process, as a user would type it."""
    program = Path(sys.argv[0]).name
    if program in ("vitrail", "__main__.py"):
        return ["vitrail", *sys.argv[1:]]
    return [Path(sys.executable).name, *sys.argv]
