"""LAMB against its formula and against timm's."""

import copy

import numpy as np
import pytest
import torch
from timm.optim.lamb import Lamb as TimmLamb
from torch import nn

from vitrail.training.optimizers import Lamb


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def groups(model: nn.Module, decay: float) -> list[dict]:
    kernels = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    return [
        {"params": kernels, "weight_decay": decay},
        {"params": others, "weight_decay": 0.0},
    ]


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    images = torch.randn(16, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        optimizer.zero_grad()
        model(images).square().sum().backward()
        optimizer.step()


def test_a_step_is_the_papers_formula():
    rng = np.random.default_rng(0)
    x, lr, betas, eps, decay = rng.normal(size=(4, 3)), 0.05, (0.8, 0.9), 1e-6, 0.1
    parameter = nn.Parameter(torch.from_numpy(x.copy()))
    optimizer = Lamb([parameter], lr=lr, betas=betas, eps=eps, weight_decay=decay)
    m = v = np.zeros_like(x)
    for step in range(1, 6):
        gradient = rng.normal(size=x.shape)
        parameter.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
        m = betas[0] * m + (1 - betas[0]) * gradient
        v = betas[1] * v + (1 - betas[1]) * gradient**2
        r = m / (1 - betas[0] ** step) / (np.sqrt(v / (1 - betas[1] ** step)) + eps)
        update = r + decay * x
        x = x - lr * np.linalg.norm(x) / np.linalg.norm(update) * update
    np.testing.assert_allclose(parameter.detach().numpy(), x, rtol=1e-12)


@pytest.mark.parametrize("decay", [0.0, 0.02, 0.5])
def test_it_agrees_with_timms(decay):
    model = network()
    other = copy.deepcopy(model)
    learn(model, Lamb(groups(model, decay), lr=0.01), 20)
    # Clipping is the loop's work here, timm's optimizer has it inside.
    learn(other, TimmLamb(groups(other, decay), lr=0.01, max_grad_norm=None), 20)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_a_zero_parameter_moves_by_adams_step():
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([1.0, -2.0, 3.0])
    Lamb([parameter], lr=0.1, weight_decay=0.1).step()
    torch.testing.assert_close(parameter.detach(), torch.tensor([-0.1, 0.1, -0.1]))


def test_it_goes_on_from_its_state_to_the_bit():
    model = network()
    optimizer = Lamb(groups(model, 0.1), lr=0.01)
    learn(model, optimizer, 3)
    resumed = copy.deepcopy(model)
    again = Lamb(groups(resumed, 0.1), lr=0.01)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    learn(model, optimizer, 3)
    learn(resumed, again, 3)
    for one, other in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


def test_parameters_without_a_gradient_stay():
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    used.grad = torch.ones(2)
    Lamb([used, unused]).step()
    assert torch.equal(unused, torch.ones(2))
    assert not torch.equal(used, torch.ones(2))
