import pytest
import torch
from torch import nn

from tests.models import SMALL, small
from vitrail.config import Optim
from vitrail.model import create
from vitrail.training.objectives.classification import Classification
from vitrail.training.optim import build_optimizer, is_kernel, parameter_groups

TINY = {"width": 16, "depth": 4, "heads": 2, "mlp": 32}


def test_only_kernels_decay():
    model = create("Ti/16", 5, size=32, pool="class", hidden=True, registers=2, **TINY)
    decaying = {name for name, p in model.named_parameters() if is_kernel(name, p)}
    assert decaying == {
        name
        for name, p in model.named_parameters()
        if name.endswith("weight") and "norm" not in name
    }
    assert "positions.0.table" not in decaying
    assert "embedding.weight" in decaying


@pytest.mark.parametrize("kind", SMALL)
def test_every_parameter_is_in_exactly_one_group(kind):
    model = small(kind)
    groups = parameter_groups(model, weight_decay=0.1, layer_decay=0.75)
    grouped = [id(p) for group in groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())


def test_layers_learn_the_slower_the_deeper_they_lie():
    model = create("Ti/16", 5, size=32, **TINY)
    task = Classification(model, 5)
    groups = parameter_groups(task, weight_decay=0.0, layer_decay=0.5)
    scale = {id(p): group["scale"] for group in groups for p in group["params"]}
    names = dict(model.named_parameters())
    assert scale[id(names["head.weight"])] == 1.0
    assert scale[id(names["blocks.3.mlp.fc1.weight"])] == 0.5
    assert scale[id(names["blocks.0.mlp.fc1.weight"])] == 0.5**4
    assert scale[id(names["embedding.weight"])] == 0.5**5
    assert scale[id(names["positions.0.table"])] == 0.5**5


def test_a_head_alone_learns_at_the_full_rate():
    groups = parameter_groups(nn.Linear(4, 2), weight_decay=0.0, layer_decay=0.5)
    assert {group["scale"] for group in groups} == {1.0}


def test_all_layers_learn_alike_by_default():
    model = create("R50x1", 5, size=32)
    assert {g["scale"] for g in parameter_groups(model, 0.1, 1.0)} == {1.0}


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "lamb", "muon"])
def test_optimizers_take_their_settings(name):
    model = create("Ti/16", 5, size=32, **TINY)
    settings = Optim(name=name, lr=0.2, weight_decay=0.3, momentum=0.8, beta1=0.7, beta2=0.9)
    optimizer = build_optimizer(model, settings, torch.device("cpu"))
    group = optimizer.param_groups[0]
    assert group["lr"] == 0.2
    if name == "sgd":
        assert group["momentum"] == 0.8
    else:
        assert group["betas"] == (0.7, 0.9)
    assert {g["weight_decay"] for g in optimizer.param_groups} == {0.0, 0.3}
