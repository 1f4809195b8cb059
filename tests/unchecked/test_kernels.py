from importlib import import_module
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")


def compiled(kernel, pointers, numbers, constants, **options):
    """For an H200, which need not be there."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as triton_compile

    types = dict.fromkeys(pointers[0].split(), "*bf16") | dict.fromkeys(
        pointers[1].split(), "*fp32"
    )
    types |= {name: "fp32" if name in ("scale", "eps") else "i32" for name in numbers.split()}
    names = kernel.arg_names
    constants = {name: None for name in names if name not in types} | constants
    signature = {name: types.get(name, "constexpr") for name in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places)
    return triton_compile(source, target=GPUTarget("cuda", 90, 32), options=options)


HEAD = {"heads": 12, "head_width": 64, "keys": 256}
STEPS = "image_step head_step row_step step"
ROW = {"width": 768, "block": 1024, "scaled": False}
COMPILED = {
    "attention": (
        ("qkv out", "lse"), f"scale tokens {STEPS}", HEAD | {"rows": 64, "biased": False}
    ),
    "attention_gradient": (
        ("qkv out grad grad_qkv", "lse partial"), f"scale tokens {STEPS}",
        HEAD | {"rows": 32, "biased": False},
    ),
    "attention, biased": (
        ("qkv relative out", "lse"), f"scale tokens {STEPS}", HEAD | {"rows": 64, "biased": True}
    ),
    "attention_gradient, biased": (
        ("qkv relative out grad grad_qkv grad_relative", "lse partial"), f"scale tokens {STEPS}",
        HEAD | {"rows": 32, "biased": True},
    ),
    "group_norm": (
        ("x y", "gamma beta stats"), "area channels groups eps",
        {"size": 3, "block": 64, "rows": 64, "relu": True},
    ),
    "group_norm_gradient": (
        ("x grad grad_x", "gamma beta stats partial"), "area channels groups",
        {"size": 3, "block": 64, "rows": 64, "relu": True},
    ),
    "sum_norm": (
        ("x y total h", "gamma beta stats"), "rows tokens eps", ROW | {"height": 4, "added": True}
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
    pointers, numbers, constants = COMPILED[name]
    name = name.partition(",")[0]
    module = import_module(f"vitrail.model.kernels.{name.removesuffix('_gradient')}")
    found = compiled(getattr(module, f"_{name}_kernel"), pointers, numbers, constants)
    assert found.asm["cubin"]
    assert found.metadata.shared <= 160 * 1024  # of an A100
