"""LAMB (You et al. 2020, arXiv 1904.00962), with which DeiT III is trained.

Adam's step and the weight decay form one update, and every tensor's update is as long as the
tensor itself, times the learning rate. Tensors that do not decay (biases, norms, tokens) take
Adam's own step, as in the implementation that DeiT III used (NVIDIA's).
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from vitrail.training.grouped import GroupedOptimizer, gradients_of


class Lamb(GroupedOptimizer):
    """Layer-wise adaptive moments; nothing in a step waits for the device."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    def update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """One tensor at a time: each has a length of its own."""
        for parameter, gradient in zip(parameters, gradients_of(parameters), strict=True):
            self.move(parameter, gradient, group)

    def move(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        """Algorithm 2 of the paper, for one tensor."""
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.lerp_(grad, 1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = (square / (1 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
        change = (mean / (1 - beta1 ** state["step"])).div_(root)
        if group["weight_decay"]:
            change.add_(parameter, alpha=group["weight_decay"])
            change.mul_(trust_ratio(parameter, change))
        parameter.add_(change, alpha=-group["lr"])


def trust_ratio(parameter: Tensor, change: Tensor) -> Tensor:
    """What makes the change as long as the parameter; 1 where either of them is zero."""
    length, step = torch.linalg.vector_norm(parameter), torch.linalg.vector_norm(change)
    return torch.where((length > 0) & (step > 0), length / step, 1.0)
