"""torch.compile, torch.export and the meta device, for a small member of every family.

Run without shape checking: its wrappers can be neither compiled nor exported.
"""

import pytest
import torch
import torch.nn.functional as F
from torch.export import Dim, export

import vitrail
from tests.models import SMALL, small

# Without the kinds that only have other numbers than another one.
KINDS = [kind for kind in SMALL if kind not in ("vit-b", "resnet-wide", "hybrid-16")]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_graph_compiles_forward_and_backward(kind):
    images, labels = torch.randn(2, 3, 64, 64), torch.tensor([0, 1])

    def gradients(compiled: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(1)
        model = small(kind).train()
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        F.cross_entropy(run(images), labels).backward()
        return {name: p.grad for name, p in model.named_parameters()}

    eager, whole = gradients(compiled=False), gradients(compiled=True)
    for name, gradient in eager.items():
        assert (whole[name] - gradient).abs().max() < 1e-3 * (1 + gradient.abs().max()), name


@pytest.mark.parametrize("kind", ["vit", "hybrid-root"])
def test_compiled_kernels_give_the_same_logits(kind):
    model = small(kind)
    compiled = torch.compile(model, fullgraph=True)
    images = torch.randn(2, 3, 64, 64)
    with torch.inference_mode():
        assert (compiled(images) - model(images)).abs().max() < 1e-3 * model(images).abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_program_takes_any_batch(kind):
    model = small(kind)
    program = export(model, (torch.randn(2, 3, 64, 64),), dynamic_shapes=({0: Dim("batch")},))
    for batch in (1, 3, 7):
        images = torch.randn(batch, 3, 64, 64)
        with torch.inference_mode():
            difference = (program.module()(images) - model(images)).abs().max()
            assert difference < 1e-5 * (1 + model(images).abs().max())


@pytest.mark.parametrize("kind", ["vit", "vit-factorized", "vit-relative", "hybrid", "axial-vit"])
def test_another_size_compiles_whole_too(kind):
    model = small(kind)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    images = torch.randn(2, 3, 96, 64)
    with torch.inference_mode():
        assert (compiled(images) - model(images)).abs().max() < 1e-4


@pytest.mark.parametrize("kind", ["vit", "resnet"])
def test_compiling_goes_with_autocast_and_recomputed_activations(kind):
    model = small(kind).train()
    model.activation_checkpointing = True
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(compiled(torch.randn(2, 3, 64, 64)).float(), torch.tensor([0, 1]))
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_made_on_the_meta_device_takes_weights_later(kind):
    model = small(kind)
    variant, options = SMALL[kind]
    with torch.device("meta"):
        empty = vitrail.create(variant, classes=7, size=64, **options)
    assert all(parameter.is_meta for parameter in empty.parameters())
    empty.load_state_dict(model.state_dict(), assign=True)
    images = torch.randn(2, 3, 64, 64)
    with torch.inference_mode():
        assert torch.equal(empty.eval()(images), model(images))
