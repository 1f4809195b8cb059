"""All that an exact resume needs, in one file: weights, optimiser, averages, counters.

Order, augmentation and dropout are functions of the seed and the step, so no random state and no
data position is kept beside the step.
"""

import pickle
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

from vitrail.errors import FailureError, one_line
from vitrail.training.averaging import Average
from vitrail.weights.files import replace_with

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass
class Counters:
    """How far a run has come."""

    step: int = 0
    """Updates done."""
    seconds: float = 0.0
    """Time spent on updates and what is done between them, over all sittings."""
    prepared: float = 0.0
    """Seconds spent before them, as on the features of a frozen backbone."""
    best: dict[str, Any] | None = None
    """The best evaluation so far."""
    since_best: int = 0
    """Evaluations since then."""
    stopped_early: bool = False

    @property
    def spent(self) -> float:
        """Seconds of the whole run so far."""
        return self.prepared + self.seconds


@dataclass(frozen=True)
class Learner:
    """What changes while a run goes on."""

    task: nn.Module
    """The objective with its model inside, spread over the devices."""
    optimiser: torch.optim.Optimizer
    average: Average | None
    scaler: torch.amp.GradScaler

    def averaged(self) -> AbstractContextManager[None]:
        """The model with its averaged weights, where an average is kept."""
        return nullcontext() if self.average is None else self.average.in_place()

    def state(self) -> dict[str, Any]:
        """Everything as plain tensors and numbers. All processes must ask for it together."""
        state: dict[str, Any] = {"scaler": self.scaler.state_dict()}
        if sharded(self.task):
            state["model"] = get_model_state_dict(self.task, options=WHOLE)
            state["optimiser"] = get_optimizer_state_dict(self.task, self.optimiser, options=WHOLE)
        else:
            state["model"] = bare(self.task).state_dict()
            state["optimiser"] = self.optimiser.state_dict()
        if self.average is not None:
            # One at a time to the CPU: all of them together may be larger than a device.
            state["average"] = {name: whole(x).cpu() for name, x in self.average.tensors.items()}
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Takes up where `state` was written."""
        self.scaler.load_state_dict(state["scaler"])
        if sharded(self.task):
            set_model_state_dict(self.task, state["model"], options=WHOLE)
            set_optimizer_state_dict(
                self.task, self.optimiser, optim_state_dict=state["optimiser"], options=WHOLE
            )
        else:
            bare(self.task).load_state_dict(state["model"])
            self.optimiser.load_state_dict(state["optimiser"])
        if self.average is not None:
            for name, x in self.average.tensors.items():
                x.copy_(like(state["average"][name], x))

    def weights(self) -> dict[str, Tensor]:
        """The model's tensors, whole and on the CPU. All processes must ask for them together."""
        task = bare(self.task)
        state: Any = (
            get_model_state_dict(task, options=WHOLE) if sharded(task) else task.state_dict()
        )
        return {
            name.removeprefix("model."): x.detach().cpu().clone()
            for name, x in state.items()
            if name.startswith("model.")
        }


def bare(task: nn.Module) -> nn.Module:
    """The objective inside what spreads it over devices."""
    return task.module if isinstance(task, nn.parallel.DistributedDataParallel) else task


def sharded(task: nn.Module) -> bool:
    """Whether each process has only a part of the model."""
    return any(isinstance(module, FSDPModule) for module in task.modules())


def whole(x: Tensor) -> Tensor:
    """All of a tensor of which each process has a part."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def like(x: Tensor, part: Tensor) -> Tensor:
    """A whole tensor cut as another one is."""
    x = x.to(part.device)
    return (
        distribute_tensor(x, part.device_mesh, part.placements) if isinstance(part, DTensor) else x
    )


def write(path: Path, learner_state: dict[str, Any], counters: Counters) -> None:
    """Puts a checkpoint in the place of the last one, in one move."""
    content = {"learner": learner_state, "counters": vars(counters)}
    replace_with(path, lambda part: torch.save(content, part))


def read(path: Path) -> tuple[dict[str, Any], Counters]:
    """A checkpoint, without running anything that it may hold."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        return content["learner"], Counters(**content["counters"])
    except (OSError, RuntimeError, pickle.UnpicklingError, KeyError, TypeError, EOFError) as error:
        raise FailureError(
            f"cannot resume from {path} ({one_line(error)}); begin anew elsewhere with --out"
        ) from None
