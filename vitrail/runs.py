"""The run folder: everything about one run, readable by people and by every other verb.

config.toml        the resolved settings; itself a recipe
run.json           command, commit, versions, hardware, seed, times, status, cost, best score
metrics.jsonl      one JSON object per event: the only source of curves
log.txt            what the terminal said
model.safetensors  the weights that were kept, with classes and preprocessing
last.pt            all that an exact resume needs
previous.pt        the checkpoint before it, should last.pt be damaged
training_images.npy  eight bytes of each training image, so that evaluation can leave it out
augmented.jpg      training images as the model saw them
evaluation/*.json  one per evaluated part of the data
inspection/        what the model looks at: numbers in inspection.json, and pictures
report.html        all of the above on one page
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
from vitrail.config import Config
from vitrail.console import escaped, say
from vitrail.errors import FailureError, VitrailError, one_line
from vitrail.files import append, make_folder, read_json, read_lines, replace_with, write_text
from vitrail.settings import changed, load, to_toml

LONGEST_NAME = 120
LONGEST_TITLE = 40


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
        """Whether there is something to resume from."""
        # A kill between two renames leaves the previous one alone.
        return self.checkpoint.exists() or self.previous_checkpoint.exists()

    def inspected(self) -> bool:
        """Whether what the model looks at has been written."""
        return (self.folder / "inspection" / "inspection.json").exists()

    def info(self) -> dict[str, Any]:
        """What run.json says; empty where there is none."""
        info = read_json(self.folder / "run.json")
        cost = info.get("cost")
        return info | {"cost": aliases.keys(cost)} if isinstance(cost, dict) else info

    def update(self, **facts: Any) -> None:
        """Changes facts in run.json."""
        if self.writes:
            write_text(self.folder / "run.json", json.dumps(self.info() | facts, indent=2) + "\n")

    def name_broken(self, pictures: Mapping[str, str]) -> None:
        """Keeps the names of pictures that could not be decoded, and why."""
        data = self.info().get("data", {})
        self.update(data={**data, "broken": sorted(pictures.items())})

    def record_training_images(self, hashes: UInt64[np.ndarray, " n"]) -> None:
        """Keeps what the run learns from, by content."""

        def save(part: Path) -> None:
            with part.open("wb") as file:
                np.save(file, np.unique(hashes[hashes > 0]))

        if self.writes:
            replace_with(self.training_images, save)

    def say(self, line: str) -> None:
        """One line on the terminal and in log.txt."""
        if self.writes:
            say(line)
            append(self.folder / "log.txt", escaped(line))

    def log(self) -> str:
        """What log.txt holds."""
        path = self.folder / "log.txt"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def event(self, **values: Any) -> None:
        """One line in metrics.jsonl."""
        if self.writes:
            append(self.folder / "metrics.jsonl", json.dumps(values))

    def events(self) -> list[dict[str, Any]]:
        """What metrics.jsonl holds; a line cut short by a crash is left out."""
        path = self.folder / "metrics.jsonl"
        return read_lines(path) if path.exists() else []

    def forget_after(self, step: int) -> None:
        """Drops the events after a step: a resumed run will live through them again."""
        if self.writes:
            kept = [json.dumps(event) for event in self.events() if event.get("step", 0) <= step]
            write_text(self.folder / "metrics.jsonl", "".join(line + "\n" for line in kept))

    def write_evaluation(self, split: str, result: Mapping[str, Any]) -> Path:
        """Keeps what an evaluation found."""
        path = self.folder / "evaluation" / f"{split}.json"
        if self.writes:
            make_folder(path.parent)
            write_text(path, json.dumps(result, ensure_ascii=False) + "\n")
        return path

    def evaluation(self, split: str) -> dict[str, Any]:
        """What an evaluation found; empty where there was none."""
        return read_json(self.folder / "evaluation" / f"{split}.json")


@contextmanager
def held(folder: Path) -> Iterator[Path]:
    """Keeps other processes from training in a folder until this one ends, however it ends."""
    make_folder(folder)
    try:
        import fcntl
    except ImportError:  # Windows
        yield folder
        return
    path = folder / ".lock"
    try:
        file = path.open("a")
    except OSError as error:
        raise FailureError(f"cannot write {path} ({one_line(error)})") from None
    with file:
        try:
            # A lock of this process alone: those that decode its pictures may outlive it a while.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise BusyError(
                f"another process is training in {folder} right now; wait for it, or choose "
                "another folder with --out"
            ) from None
        yield folder


@contextmanager
def claimed(folder: Path) -> Iterator[Path]:
    """Holds the first free folder of NAME, NAME-2, NAME-3, …, and yields it."""
    for place in numbered(folder):
        if taken(place):
            continue
        with ExitStack() as stack:
            try:
                stack.enter_context(held(place))
            except BusyError:
                continue
            if not taken(place):  # by a process that came first and has ended since
                yield place
                return


def busy(folder: Path) -> bool:
    """Whether another process is training in a folder."""
    try:
        with held(folder):
            return False
    except BusyError:
        return True


def numbered(folder: Path) -> Iterator[Path]:
    """NAME, NAME-2, NAME-3, …"""
    yield folder
    for number in itertools.count(2):
        yield folder.with_name(f"{folder.name}-{number}")


def taken(folder: Path) -> bool:
    """Whether a folder holds anything that a new run would overwrite or mix with."""
    if not folder.is_dir():
        return folder.exists()
    return not is_void(Run(folder)) and any(path.name != ".lock" for path in folder.iterdir())


def is_void(run: Run) -> bool:
    """Whether a run failed before there was anything to resume from."""
    return run.info().get("status") == "failed" and not run.has_checkpoint()


def create(folder: Path, config: Config, facts: Mapping[str, Any], resume: bool) -> Run:
    """A new run folder, or the old one to go on with.

    Nothing is overwritten, but for a run that failed before there was anything to go on from.
    """
    run = Run(folder)
    if not resume and is_void(run):
        for name in ("run.json", "metrics.jsonl", "log.txt", "augmented.jpg"):
            (folder / name).unlink(missing_ok=True)
    if (folder / "run.json").exists() and not resume:
        finished = run.info().get("status") == "finished"
        ways = "" if finished else "resume it with --resume, or "
        raise VitrailError(
            f"{folder} holds {described(run)}; {ways}choose another folder with --out"
        )
    if (folder / "config.toml").exists() and resume:
        refuse_other(folder, config)
    make_folder(folder)
    for part in folder.glob(".*.part"):
        part.unlink(missing_ok=True)  # what a killed session was writing
    write_text(folder / "config.toml", to_toml(config))
    if not run.info():
        run.update(name=folder.name, started=now(), seconds=0.0, best=None, **facts)
    run.update(status="running", message="", resumed=resume)
    return run


def refuse_other(folder: Path, config: Config) -> None:
    """A run goes on as it began; only how the machine is used may change."""
    began = load(folder / "config.toml")
    then, now = (
        ", ".join(one for one in differing if not one.startswith(("system.", "sweep.")))
        for differing in (changed(began, config), changed(config, began))
    )
    if now:
        raise VitrailError(
            f"{folder} was begun with {then}, not {now}; `{resume_command(folder)}` goes on "
            "as it began, another --out begins anew"
        )


def resume_command(folder: Path) -> str:
    """What to type to continue a run."""
    return shlex.join(["vitrail", "train", str(folder), "--resume"])


def described(run: Run) -> str:
    """`a finished run (94.12 %)`."""
    status = run.info().get("status", "unfinished")
    top1 = score(run)[0]
    told = f" ({100 * top1:.2f} %)" if top1 is not None else ""
    return f"{'an' if status[0] in 'aeiou' else 'a'} {status} run{told}"


def score(run: Run) -> tuple[float | None, str, int]:
    """The run's top-1, where it was measured and on how many images: test before val."""
    for split in ("test", "val"):
        if found := run.evaluation(split):
            return found.get("top1"), split, found.get("n", 0)
    best = run.info().get("best") or {}
    return best.get("top1"), "val", best.get("n", 0)


def title_of(source: str) -> str:
    """A short name for DATA: its folder's, or what its shards' names have in common."""
    path = Path(source).expanduser()
    known = path.resolve() if os.path.lexists(path) else path
    for part in reversed(known.parts):
        stem = re.sub(r"\.tar.*|[{\[*?].*", "", part)
        if title := re.sub(r"[^\w.-]+", "-", stem)[:LONGEST_TITLE].strip("-_."):
            return title
    return "data"


def name_of(recipe: str, settings: Sequence[str]) -> str:
    """A folder's name: the recipe, or the data, and what was changed in it."""
    told = [setting for setting in settings if not setting.startswith("system.")]
    parts = [recipe, *(shortened(setting) for setting in told)]
    name = "+".join(re.sub(r"[^\w.=-]+", "-", part).strip("-.") for part in parts)
    if len(name) > LONGEST_NAME:
        name = f"{name[: LONGEST_NAME - 9]}-{sha256(name.encode()).hexdigest()[:8]}"
    return name


def shortened(setting: str) -> str:
    """Of a value that is a path, its last part; `B/16-in21k` is none."""
    key, _, value = setting.partition("=")
    is_path = Path(value).is_absolute() or ("/" in value and Path(value).exists())
    return f"{key}={Path(value).name if is_path else value}"


def is_run(folder: Path) -> bool:
    """Whether a folder holds a run."""
    return (folder / "run.json").is_file() and (folder / "config.toml").is_file()


def run_of(model: Path) -> Run | None:
    """The run that a MODEL is, or lies in."""
    found = next((folder for folder in (model, model.parent) if is_run(folder)), None)
    return None if found is None else Run(found)


def training_images(model: Path | None) -> UInt64[np.ndarray, " n"] | None:
    """Hashes of the images that a MODEL learned from; None where they were not recorded."""
    run = None if model is None else run_of(model)
    if run is None or not run.training_images.exists():
        return None
    try:
        found = np.load(run.training_images, allow_pickle=False)
        if found.dtype == np.uint64 and found.ndim == 1:
            return found
        why = "it holds something else"
    except (OSError, ValueError, EOFError) as error:
        why = one_line(error)
    raise FailureError(
        f"{run.training_images} cannot be read ({why}); delete it to go by the names of images"
    )


def find(root: Path, pattern: str = "**/run.json") -> list[Run]:
    """The runs below a folder, oldest first."""
    if not root.is_dir():
        return []
    found = [Run(path.parent, writes=False) for path in root.glob(pattern)]
    return sorted(
        (run for run in found if is_run(run.folder)),
        key=lambda run: (str(run.info().get("started", "")), str(run.folder)),
    )


def row(run: Run) -> dict[str, Any]:
    """A line of the table of runs."""
    info = run.info()
    top1, split, n = score(run)
    return {
        "run": str(run.folder),
        "status": info.get("status", ""),
        "top1": top1,
        "n": n,
        "split": split if top1 is not None else "",
        "parameters": info.get("model", {}).get("parameters"),
        "seconds": info.get("seconds", 0.0),
        "started": info.get("started", ""),
    }


def provenance(command: Sequence[str]) -> dict[str, Any]:
    """What made this run: command, code and versions."""
    import torch
    import torchvision

    commit, dirty = code_version()
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


def code_version() -> tuple[str, bool]:
    """Commit of the checkout this code runs from, and whether it has changes; ("", False) for an
    installed package."""
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
    """The time, to the second, in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def command_line() -> list[str]:
    """The command this process was started with, as a user would type it."""
    program = Path(sys.argv[0]).name
    if program in ("vitrail", "__main__.py"):
        return ["vitrail", *sys.argv[1:]]
    return [Path(sys.executable).name, *sys.argv]
