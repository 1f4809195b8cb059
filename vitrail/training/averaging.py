"""Polyak averaging: a second set of weights that follows the trained one slowly (R27)."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class Average:
    """A running average of a model's parameters and floating-point buffers."""

    def __init__(self, model: nn.Module, factor: float, ramp: bool = True) -> None:
        self.factor, self.ramp = factor, ramp
        self.live = averaged(model)
        self.tensors = {name: x.clone() for name, x in self.live.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Moves the average after update number `step`, counted from zero.

        With a ramp the factor starts small, or the average would stay close to the initial
        weights for thousands of updates.
        """
        factor = min(self.factor, (1 + step) / (10 + step)) if self.ramp else self.factor
        torch._foreach_lerp_(own_parts(self.tensors), own_parts(self.live), 1 - factor)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model with the averaged weights, for as long as the block runs."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    @torch.no_grad()
    def swap(self) -> None:
        """Exchanges the model's tensors with the averaged ones."""
        for name, live in self.live.items():
            kept = live.clone()
            live.copy_(self.tensors[name])
            self.tensors[name].copy_(kept)


def own_parts(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """What this process has of each tensor: parameters may be sharded, buffers are whole."""
    return [x.to_local() if isinstance(x, DTensor) else x for x in tensors.values()]


def averaged(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that are averaged: those with fractions."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: x.detach() for name, x in tensors.items() if x.is_floating_point()}
