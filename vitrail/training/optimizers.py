"""LAMB, which torch does not have, and Muon for all matrices of a shape at once."""

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from jaxtyping import Float
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
            if parameters := [p for p in group["params"] if p.grad is not None]:
                self.update(parameters, group)
        return loss

    @abstractmethod
    def update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """One update of parameters that share the settings of a group."""


def gradients_of(parameters: list[Tensor]) -> list[Tensor]:
    """Gradients that are known to be there."""
    return [p.grad for p in parameters if p.grad is not None]


class Lamb(GroupedOptimizer):
    """LAMB (You et al. 2020, arXiv 1904.00962), with which DeiT III is trained.

    Adam's step and the weight decay form one update, and every tensor's update is as long as the
    tensor itself, times the learning rate. Tensors that do not decay (biases, norms, tokens) take
    Adam's own step, as in the implementation that DeiT III used (NVIDIA's). Nothing in a step
    waits for the device.
    """

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
    """The factor that makes the change as long as the parameter; 1 if either is zero."""
    length, step = torch.linalg.vector_norm(parameter), torch.linalg.vector_norm(change)
    return torch.where((length > 0) & (step > 0), length / step, 1.0)


QUINTIC = (3.4445, -4.7750, 2.0315)
"""Jordan's polynomial: five rounds bring every singular value between 0.7 and 1.2 or so."""
ROUNDS = 5
USUAL_STEP = 0.2
"""The root mean square of AdamW's steps, in learning rates."""


class Muon(GroupedOptimizer):
    """Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) beside AdamW.

    Groups with `matrices` set are Muon's, the others AdamW's. A matrix moves by its momentum made
    orthogonal: all directions in which the gradients point are followed equally far, and a
    Transformer tolerates a larger learning rate. The step is as long as AdamW's usually is (Liu et
    al. 2025, arXiv 2502.16982), so one learning rate serves all parameters.

    torch.optim.Muon is the same rule for one matrix at a time and nothing else; here all matrices
    of a shape are done at once, which takes a GPU no longer than one.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        usual = {"momentum": momentum, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {"lr": lr, "matrices": False, **usual})

    def update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """The decay, which is alike for both, then the step of the one or the other."""
        if group["weight_decay"]:
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        if group["matrices"]:
            for alike in by_shape(parameters):
                self.turn(alike, group)
        else:
            self.adapt(parameters, group)

    def turn(self, matrices: list[Tensor], group: dict[str, Any]) -> None:
        """Muon's step of matrices of one shape."""
        momentum, gradients = group["momentum"], gradients_of(matrices)
        means = self.kept("momentum_buffer", matrices)
        torch._foreach_lerp_(means, gradients, 1 - momentum)
        ahead = torch._foreach_lerp(gradients, means, momentum)  # Nesterov's
        steps = orthogonal(torch.stack(ahead)).to(matrices[0])
        length = USUAL_STEP * max(matrices[0].shape) ** 0.5
        torch._foreach_add_(matrices, list(steps.unbind()), alpha=-group["lr"] * length)

    def adapt(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """AdamW's step, but for the decay."""
        beta1, beta2 = group["betas"]
        group["step"] = step = group.get("step", 0) + 1
        gradients = gradients_of(parameters)
        means, squares = (self.kept(key, parameters) for key in ("exp_avg", "exp_avg_sq"))
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - beta2)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, (1 - beta2**step) ** 0.5)
        torch._foreach_add_(roots, group["eps"])
        torch._foreach_addcdiv_(parameters, means, roots, value=-group["lr"] / (1 - beta1**step))

    def kept(self, key: str, parameters: list[Tensor]) -> list[Tensor]:
        """The optimizer's state of each parameter, zero at first."""
        for parameter in parameters:
            if key not in self.state[parameter]:
                self.state[parameter][key] = torch.zeros_like(parameter)
        return [self.state[parameter][key] for parameter in parameters]


def by_shape(matrices: list[Tensor]) -> list[list[Tensor]]:
    """Matrices that can be worked on together."""
    found: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
    for matrix in matrices:
        found[tuple(matrix.shape)].append(matrix)
    return list(found.values())


def orthogonal(matrices: Float[Tensor, "n rows columns"]) -> Float[Tensor, "n rows columns"]:
    """Each matrix with all its singular values near one, by Newton and Schulz's iteration."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    x = x.bfloat16()  # enough for a direction
    a, b, c = QUINTIC
    for _ in range(ROUNDS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
