"""What the optimisers written here share: a step is one update of each group of parameters."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class GroupedOptimizer(Optimizer):
    """Calls `update` for every group, with those of its parameters that have a gradient."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if found := [p for p in group["params"] if p.grad is not None]:
                self.update(found, group)
        return loss

    @abstractmethod
    def update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """One update of parameters that share the settings of a group."""


def gradients_of(parameters: list[Tensor]) -> list[Tensor]:
    """Gradients that are known to be there."""
    return [p.grad for p in parameters if p.grad is not None]
