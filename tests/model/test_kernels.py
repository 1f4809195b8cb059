import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import vitrail
from vitrail.model.vit import ViT

SCRIPT = Path(__file__).with_name("interpreted_kernels.py")
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")


def test_fused_kernels_compute_what_the_plain_code_does():
    names = (
        "erf",
        "drop path",
        "dropped",
        "no class token",
        "normalized after pooling",
        "heads of 24",
        "positions at every layer",
        "shared positions",
        "relative positions",
        "relative positions, heads of 24",
        "axial",
        "hybrid",
        "ResNet",
        "wide ResNet",
    )
    command = [sys.executable, str(SCRIPT), *names]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 0, run.stderr
    rows = [line.split("\t") for line in run.stdout.splitlines()]
    assert [name for name, *_ in rows] == list(names)
    for name, *differences in rows:
        assert max(map(float, differences)) < 1e-5, (name, differences)


def test_a_cpu_uses_the_plain_code():
    model = vitrail.create("B/16", classes=5, size=32, width=32, depth=1, heads=2, mlp=64)
    assert not model.fuse(torch.device("cpu"), torch.bfloat16)
    assert not model.fused


def test_a_fused_model_that_moves_to_a_cpu_uses_the_plain_code():
    model = vitrail.create("B/16", classes=5, size=32, width=32, depth=1, heads=2, mlp=64)
    images = torch.randn(1, 3, 32, 32)
    expected = model(images)
    model.fused = True
    assert torch.equal(model(images), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(images).isfinite().all()


def test_hooks_see_every_module_of_a_fused_model(monkeypatch):
    model = vitrail.create("B/16", classes=5, size=32, width=32, depth=2, heads=2, mlp=64)
    images = torch.randn(1, 3, 32, 32)
    expected = model.attention(images), model.intermediates(images, ["blocks.1"])
    model.fused = True

    def fails(*_):
        raise AssertionError("fused")

    monkeypatch.setattr("vitrail.model.vit.takes_kernels", lambda x: True)
    monkeypatch.setattr("vitrail.model.kernels.encoder.encode", fails)
    with pytest.raises(AssertionError, match="fused"):
        model(images)
    maps, outputs = model.attention(images), model.intermediates(images, ["blocks.1"])
    assert torch.equal(maps[1], expected[0][1])
    assert torch.equal(outputs["blocks.1"], expected[1]["blocks.1"])
    assert model.fused
    assert isinstance(model.unfused(), ViT)
