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


@pytest.mark.parametrize(
    "names",
    [("erf", "drop path", "heads of 24", "hybrid"), ("normalized after pooling", "unpadded")],
    ids=" ".join,
)
def test_fused_kernels_compute_what_the_plain_code_does(names):
    command = [sys.executable, str(SCRIPT), *names]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 0, run.stderr
    rows = [line.split("\t") for line in run.stdout.splitlines()]
    assert [name for name, *_ in rows] == list(names)
    for name, *differences in rows:
        assert max(map(float, differences)) < 2e-5, (name, differences)


def compiled(kernel, pointers, numbers, constants, **options):
    """For an H200, which need not be there."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    types = dict.fromkeys(pointers[0].split(), "*bf16") | dict.fromkeys(
        pointers[1].split(), "*fp32"
    )
    types |= {name: "fp32" if name in ("scale", "eps") else "i32" for name in numbers.split()}
    names = kernel.arg_names
    constants = {name: None for name in names if name not in types} | constants
    signature = {name: types.get(name, "constexpr") for name in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places)
    return compile(source, target=GPUTarget("cuda", 90, 32), options=options)


HEAD = {"heads": 12, "head_width": 64, "keys": 256}
ROW = {"width": 768, "block": 1024, "scaled": False}
COMPILED = {
    "attention": (("qkv out", "lse"), "scale tokens", HEAD | {"rows": 64}),
    "attention_gradient": (
        ("qkv out grad grad_qkv", "lse partial"), "scale tokens", HEAD | {"rows": 32}
    ),
    "sum_norm": (
        ("x y total h", "gamma beta stats"), "rows tokens eps", ROW | {"height": 4}
    ),
    "sum_norm_gradient": (
        ("total grad_total grad_h grad_x grad_y", "stats gamma partial"), "rows tokens",
        ROW | {"height": 1},
    ),
    "gelu": (("x y", ""), "size", {"tanh": False, "block": 2048}),
    "gelu_gradient": (
        ("x grad_y y grad_x", "partial"), "rows width", {"tanh": True, "height": 8, "block": 256}
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", COMPILED)
def test_kernels_compile_without_a_gpu(name):
    from vitrail.model import kernels

    pointers, numbers, constants = COMPILED[name]
    found = compiled(getattr(kernels, f"_{name}_kernel"), pointers, numbers, constants)
    assert found.asm["cubin"]
    assert found.metadata.shared <= 160 * 1024  # of an A100


def test_a_cpu_uses_the_plain_code():
    model = vitrail.create("B/16", classes=5, size=32, width=32, depth=1, heads=2, mlp=64)
    assert not model.fuse(torch.device("cpu"), torch.bfloat16)
    assert not model.fused


def test_hooks_see_every_module_of_a_fused_model(monkeypatch):
    model = vitrail.create("B/16", classes=5, size=32, width=32, depth=2, heads=2, mlp=64)
    images = torch.randn(1, 3, 32, 32)
    expected = model.attention(images), model.intermediates(images, ["blocks.1"])
    model.fused = True

    def fails(*_):
        raise AssertionError("fused")

    monkeypatch.setattr("vitrail.model.kernels.encode", fails)
    with pytest.raises(AssertionError, match="fused"):
        model(images)
    maps, outputs = model.attention(images), model.intermediates(images, ["blocks.1"])
    assert torch.equal(maps[1], expected[0][1])
    assert torch.equal(outputs["blocks.1"], expected[1]["blocks.1"])
    assert model.fused
    assert isinstance(model.unfused(), ViT)
