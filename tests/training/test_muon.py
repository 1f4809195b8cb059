"""Muon against its definition, against torch's, and its other half against AdamW."""

import copy
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from vitrail.config import Config, Optim, System
from vitrail.errors import VitrailError
from vitrail.model import create
from vitrail.training.optim import build_optimizer
from vitrail.training.optimizers import Muon, orthogonal


@pytest.mark.parametrize("shape", [(24, 12), (48, 16), (16, 48)])
def test_an_orthogonal_matrix_keeps_the_directions_and_evens_their_lengths(shape):
    torch.manual_seed(0)
    matrices = torch.randn(3, *shape)
    for matrix, found in zip(matrices, orthogonal(matrices).double(), strict=True):
        u, _, v = torch.linalg.svd(matrix.double(), full_matrices=False)
        lengths = torch.linalg.svdvals(found)
        assert lengths.min() > 0.5
        assert lengths.max() < 1.3
        cosine = torch.cosine_similarity(found.flatten(), (u @ v).flatten(), dim=0)
        assert cosine > 0.97


def test_a_zero_gradient_moves_nothing():
    assert not orthogonal(torch.zeros(2, 4, 6)).any()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    # A gradient of full rank: what lies in no direction of it is only rounding, made long.
    sizes = ((12, 24), (24, 12), (12, 24), (24, 6))
    return nn.Sequential(*(part for size in sizes for part in (nn.Linear(*size), nn.Tanh())))


def groups(model: nn.Module, decay: float) -> list[dict]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim == 1]
    return [
        {"params": matrices, "weight_decay": decay, "matrices": True},
        {"params": others, "weight_decay": decay},
    ]


def learn(model: nn.Module, steps: int, *optimizers: torch.optim.Optimizer) -> None:
    inputs = torch.randn(16, 12, generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        model.zero_grad()
        model(inputs).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()


class Counted(TorchDispatchMode):
    """Counts the calls of each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_only_the_first_step_makes_a_state():
    model = network()
    optimizer = Muon(groups(model, 0.1))
    learn(model, 1)
    with Counted() as first:
        optimizer.step()
    with Counted() as second:
        optimizer.step()
    assert first.calls["zeros_like"] == 4 + 2 * 4  # one of a matrix, two of a bias
    assert not second.calls["zeros_like"]


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_it_agrees_with_torchs_muon_and_adamw(decay):
    model = network()
    other = copy.deepcopy(model)
    learn(model, 10, Muon(groups(model, decay), lr=0.01, betas=(0.8, 0.9)))
    matrices, rest = (group["params"] for group in groups(other, decay))
    usual = {"lr": 0.01, "weight_decay": decay}
    turned = torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", momentum=0.95, **usual)
    learn(other, 10, turned, torch.optim.AdamW(rest, betas=(0.8, 0.9), **usual))
    before = dict(network().named_parameters())
    for (name, ours), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        moved = torch.linalg.vector_norm(theirs - before[name])
        apart = torch.linalg.vector_norm(ours - theirs)
        assert apart < 0.1 * moved, name  # bfloat16 rounds the two differently


def test_what_is_no_matrix_takes_adamws_step_exactly():
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.arange(5.0, dtype=torch.float64)) for _ in range(2))
    usual = {"lr": 0.05, "betas": (0.7, 0.9), "weight_decay": 0.2}
    muon, adamw = Muon([ours], **usual), torch.optim.AdamW([theirs], **usual)
    for _ in range(8):
        ours.grad = torch.randn(5, dtype=torch.float64)
        theirs.grad = ours.grad.clone()
        muon.step()
        adamw.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_it_goes_on_from_its_state_to_the_bit():
    model = network()
    optimizer = Muon(groups(model, 0.1), lr=0.01)
    learn(model, 3, optimizer)
    resumed = copy.deepcopy(model)
    again = Muon(groups(resumed, 0.1), lr=0.01)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    learn(model, 3, optimizer)
    learn(resumed, 3, again)
    for one, other in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_matrices_of_the_blocks_are_its_own_and_nothing_else():
    model = create("Ti/16", 5, size=32, width=16, depth=2, heads=2, mlp=32, hidden=True)
    optimizer = build_optimizer(model, Optim(name="muon", momentum=0.95), torch.device("cpu"))
    chosen = {id(p) for g in optimizer.param_groups if g["matrices"] for p in g["params"]}
    parts = ("attention.qkv", "attention.out", "mlp.fc1", "mlp.fc2")
    wanted = {f"blocks.{i}.{part}.weight" for i in range(2) for part in parts}
    assert {name for name, p in model.named_parameters() if id(p) in chosen} == wanted
    assert {group["momentum"] for group in optimizer.param_groups} == {0.95}


def test_parts_of_matrices_are_refused():
    with pytest.raises(VitrailError, match="needs whole matrices"):
        Config(optim=Optim(name="muon"), system=System(parallel="fsdp"))
