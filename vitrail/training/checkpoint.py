"""Everything that an exact resume needs, in one file: weights, optimizer, EMA, counters.

Order, augmentation and dropout are functions of the seed and the step, so no random state and no
data position is kept beside the step.

A checkpoint is a torch file followed by the SHA-256 of its bytes, which is verified before anything
is read from it: torch itself loads a file with flipped bits without complaint. The last two
checkpoints are kept, so that a damaged one costs a few steps and not the run.
"""

import hashlib
import os
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from vitrail import aliases
from vitrail.data.draws import ON_CPU
from vitrail.devices import Devices
from vitrail.errors import FailureError, one_line, out_of_memory
from vitrail.files import write_bytes
from vitrail.training.optim import EMA
from vitrail.weights.read import save_torch

_MARK = b"\nsha256:"
"""Stands between a checkpoint and its digest. torch ignores what follows its file."""
_TRAILER = len(_MARK) + hashlib.sha256().digest_size
_CHUNK = 1 << 20

_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass
class Counters:
    """The progress of a run."""

    step: int = 0
    """Updates done."""
    seconds: float = 0.0
    """Time spent on updates and what is done between them, over all sessions."""
    prepared: float = 0.0
    """Seconds spent before them, as on the features of a frozen backbone."""
    best: dict[str, Any] | None = None
    """The best evaluation so far."""
    since_best: int = 0
    """Evaluations since then."""
    stopped_early: bool = False
    draws: int = ON_CPU
    """Version of the rule by which order, augmentation, mixing and masking are drawn."""
    waited: float = 0.0
    """Seconds of training that the device waited for its input."""

    @property
    def spent(self) -> float:
        """Seconds of the whole run so far."""
        return self.prepared + self.seconds


@dataclass
class TrainState:
    """Everything that changes during a run."""

    wrapped: nn.Module
    """The objective, inside DistributedDataParallel where several processes train."""
    optimizer: torch.optim.Optimizer
    ema: EMA | None
    scaler: torch.amp.GradScaler
    counters: Counters = field(default_factory=Counters)

    @property
    def objective(self) -> Any:
        """The objective itself."""
        ddp = isinstance(self.wrapped, nn.parallel.DistributedDataParallel)
        return self.wrapped.module if ddp else self.wrapped

    def averaged(self) -> AbstractContextManager[None]:
        """The model with the averaged weights, where there is a moving average."""
        return nullcontext() if self.ema is None else self.ema.in_place()

    def tensors(self) -> dict[str, Any]:
        """All but the counters, as plain tensors and numbers. All processes must call it."""
        state: dict[str, Any] = {"scaler": self.scaler.state_dict()}
        if _is_sharded(self.wrapped):
            state["model"] = get_model_state_dict(self.wrapped, options=_WHOLE)
            state["optimizer"] = get_optimizer_state_dict(
                self.wrapped, self.optimizer, options=_WHOLE
            )
        else:
            state["model"] = self.objective.state_dict()
            state["optimizer"] = self.optimizer.state_dict()
        if self.ema is not None:
            # One at a time to the CPU: all of them together may be larger than a device.
            state["ema"] = {name: _gathered(x).cpu() for name, x in self.ema.tensors.items()}
        return state

    def restore(self, state: dict[str, Any], counters: Counters, path: Path) -> None:
        """Continues from a checkpoint, which was read from `path`."""
        try:
            self._load(state)
            self.counters = counters
        except (KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and out_of_memory(error):
                raise
            why = f"{error} is missing" if isinstance(error, KeyError) else one_line(error)
            raise FailureError(
                f"cannot resume from {path}: it does not fit the run ({why}); start over in "
                "another folder with --out"
            ) from None

    def _load(self, state: dict[str, Any]) -> None:
        self.scaler.load_state_dict(state["scaler"])
        # A sharded run names its parameters, any other numbers them; either resumes as the other.
        names = self._parameter_names()
        if _is_sharded(self.wrapped):
            set_model_state_dict(self.wrapped, state["model"], options=_WHOLE)
            named = _rekeyed(state["optimizer"], dict(enumerate(names)))
            set_optimizer_state_dict(
                self.wrapped, self.optimizer, optim_state_dict=named, options=_WHOLE
            )
        else:
            self.objective.load_state_dict(state["model"])
            numbers = {name: number for number, name in enumerate(names)}
            self.optimizer.load_state_dict(_rekeyed(state["optimizer"], numbers))
        if self.ema is not None:
            for name, x in self.ema.tensors.items():
                x.copy_(_distributed_like(state["ema"][name], x))

    def _parameter_names(self) -> list[str]:
        """The names of the optimizer's parameters, in its own order."""
        names = {x: name for name, x in self.objective.named_parameters()}
        return [names[x] for group in self.optimizer.param_groups for x in group["params"]]

    def weights(self) -> dict[str, Tensor]:
        """The model's tensors, whole and on the CPU. All processes must call it together."""
        objective: Any = self.objective
        state = objective.state_dict()
        if _is_sharded(objective):
            state = get_model_state_dict(objective, options=_WHOLE)
        return {
            name.removeprefix("model."): x.detach().cpu().clone()
            for name, x in state.items()
            if name.startswith("model.")
        }


def _rekeyed(state: dict[str, Any], keys: Mapping[Any, Any]) -> dict[str, Any]:
    """An optimizer's state with other keys for its parameters, where there are others."""
    groups = [
        group | {"params": [keys.get(key, key) for key in group["params"]]}
        for group in state["param_groups"]
    ]
    return {
        "state": {keys.get(key, key): value for key, value in state["state"].items()},
        "param_groups": groups,
    }


def _is_sharded(task: nn.Module) -> bool:
    """Whether each process has only a part of the model."""
    return any(isinstance(module, FSDPModule) for module in task.modules())


def _gathered(x: Tensor) -> Tensor:
    """The whole of a tensor of which each process has a part."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def _distributed_like(x: Tensor, part: Tensor) -> Tensor:
    """A whole tensor, sharded as another one is."""
    x = x.to(part.device)
    return (
        distribute_tensor(x, part.device_mesh, part.placements) if isinstance(part, DTensor) else x
    )


class HashedFile:
    """A file that is written and hashed at once."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.sum = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> int:
        self.sum.update(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def write(path: Path, previous: Path, state: dict[str, Any], counters: Counters) -> None:
    """Writes a checkpoint in the place of the last one, which becomes `previous`."""
    content = {"learner": state, "counters": vars(counters)}

    def save(file: IO[bytes]) -> None:
        hashed = HashedFile(file)
        save_torch(hashed, content)
        file.write(_MARK + hashed.sum.digest())

    write_bytes(path, save, previous=previous)


def read(path: Path) -> tuple[dict[str, Any], Counters]:
    """A checkpoint, without running anything that it may hold."""
    try:
        with path.open("rb") as file:
            _verify(file)
            content = torch.load(file, map_location="cpu", weights_only=True)
        counters = {"draws": 1} | content["counters"]
        return aliases.keys(content["learner"]), Counters(step=counters.pop("step"), **counters)
    except MemoryError:
        raise
    except Exception as error:  # a damaged file can make torch raise anything
        if isinstance(error, RuntimeError) and out_of_memory(error):
            raise
        why = f"{error} is missing" if isinstance(error, KeyError) else one_line(error)
        raise FailureError(f"{path.name} cannot be used: {why}") from None


def _verify(file: IO[bytes]) -> None:
    """Raises where the bytes of a checkpoint are not those that were written."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _TRAILER))
    trailer = file.read()
    file.seek(0)
    if not trailer.startswith(_MARK):
        # Written before digests were: torch's files carry a CRC-32 of each part.
        with zipfile.ZipFile(file) as archive:
            wrong = archive.testzip()
    else:
        found, left = hashlib.sha256(), size - _TRAILER
        while chunk := file.read(min(_CHUNK, left)):
            found.update(chunk)
            left -= len(chunk)
        wrong = found.digest() != trailer.removeprefix(_MARK)
    if wrong:
        raise ValueError("its checksum is wrong, so the file is damaged")
    file.seek(0)


def read_newest(
    paths: Sequence[Path], devices: Devices
) -> tuple[Path, dict[str, Any], Counters, list[str]]:
    """The first checkpoint that every process can read, and what is wrong with those before it.

    All processes must call it together.
    """
    problems: list[str] = []
    for path in paths:
        found, problem = None, {}
        try:
            found = read(path)
        except FailureError as error:
            problem = {str(error): ""}
        # One process alone must not go back to an older one.
        wrong = devices.union(problem)
        if found is not None and not wrong:
            return path, *found, problems
        problems += wrong
    raise FailureError(
        f"cannot resume {paths[0].parent}: {'; '.join(problems)}; start over in another folder "
        "with --out"
    )
