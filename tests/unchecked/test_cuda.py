"""What only an NVIDIA GPU can show."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import vitrail
from vitrail.config import Augment
from vitrail.data.batch_augment import BatchAugment
from vitrail.data.dataset import ArraySource
from vitrail.data.decoded import CutImages, decode_images, decoded_batches
from vitrail.data.loader import RankBatchSampler, ShuffledOrder, prepared_ahead, training_batches
from vitrail.data.preprocessing import Preprocessing
from vitrail.devices import Devices, graph_forward, graph_inference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
KINDS = [torch.bfloat16, torch.float16]


def small(**options):
    torch.manual_seed(0)
    model = vitrail.create("S/16", classes=10, depth=3, **options).cuda()
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    return model


def distance(a, b):
    return ((a.double() - b).norm() / b.norm()).item()


def gradients(model, images, kind=None):
    model.train().zero_grad()
    with torch.autocast("cuda", kind or torch.bfloat16, kind is not None):
        logits = model(images)
    (logits.double().square().mean() + logits.double().mean()).backward()
    return {name: p.grad.double().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("gelu", ["tanh", "erf"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [224, 64, 288])
def test_fused_gradients_are_as_near_to_float64_as_plain_ones(gelu, kind, size):
    images = torch.randn(8, 3, size, size, device="cuda")
    model = small(gelu=gelu, size=size)
    plain = gradients(model, images, kind)
    assert model.fuse(torch.device("cuda"), kind)
    fused = gradients(model, images, kind)
    model.fused = False
    truth = gradients(model.double(), images.double())
    for name, expected in truth.items():
        worst = 1.5 * distance(plain[name], expected) + 1e-3
        assert distance(fused[name], expected) < worst, name


OTHERS = {
    "relative": {"positions": "relative", "class_slot": False},
    "every layer": {"injection": "every"},
    "axial": {"axial": True, "pool": "mean", "class_token": False},
    "hybrid": {"backbone": (1, 1), "patch": 2, "size": 96},
    "ResNet": {"variant": "R26x1", "size": 96},
    "small root": {"variant": "R14x0.375", "size": 32, "root": "small"},
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_have_fused_kernels_too(name):
    torch.manual_seed(0)
    options = {"variant": "S/16", "size": 64, "depth": 3, **OTHERS[name]}
    if "R" in options["variant"]:
        del options["depth"]
    model = vitrail.create(**options, classes=10).cuda()
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    images = torch.randn(8, 3, *model.architecture.size, device="cuda")
    plain = gradients(model, images, torch.bfloat16)
    assert model.fuse(torch.device("cuda"), torch.bfloat16)
    fused = gradients(model, images, torch.bfloat16)
    truth = gradients(model.double(), images.double())  # takes no kernels
    for key, expected in truth.items():
        worst = 1.5 * distance(plain[key], expected) + 1e-3
        assert distance(fused[key], expected) < worst, key


def test_gelu_of_cublas_is_the_approximation():
    x = torch.linspace(-4, -2, 256, device="cuda", dtype=torch.float16)[:, None].expand(-1, 64)
    identity, zero = torch.eye(64, device="cuda").half(), torch.zeros(64, device="cuda").half()
    found = torch._addmm_activation(zero, x, identity, use_gelu=True)
    near = distance(found, F.gelu(x.double(), approximate="tanh"))
    assert near < 0.1 * distance(found, F.gelu(x.double()))


@torch.inference_mode()
def test_small_batches_are_replayed():
    model = small().bfloat16().eval()
    assert model.fuse(torch.device("cuda"), torch.bfloat16)
    replayed = graph_inference(model.features, most=8)
    images = torch.randn(9, 3, 224, 224, device="cuda", dtype=torch.bfloat16)
    expected = model.features(images).float()
    for rows in (slice(0, 1), slice(1, 4), slice(0, 8), slice(2, 5), slice(0, 9), slice(8, 9)):
        found = replayed(images[rows]).float()
        assert distance(found, expected[rows]) < 2e-2
    first = replayed(images[:1])
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: replayed(images[:1]), range(20)))
    assert all(torch.equal(one, first) for one in found)


def steps(model, optimizer, numbers):
    """Updates whose drop path depends on the number of the step alone."""
    for number in numbers:
        torch.manual_seed(number)
        images = torch.randn(4, 3, 224, 224, device="cuda")
        targets = torch.arange(4, device="cuda")
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(model(images).float(), targets)
        loss.backward()
        optimizer.step()


def trained(*parts):
    """Weights after updates, recorded anew for each part."""
    model = small(drop_path=0.5).train()
    assert model.fuse(torch.device("cuda"), torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for part in parts:
        model.__dict__.pop("forward", None)
        if part is not None:
            graph_forward(model, 4)
            steps(model, optimizer, part)
    return torch.nn.utils.parameters_to_vector(model.parameters())


def test_recorded_training_is_repeatable_and_resumes_exactly():
    whole = trained(range(6))
    assert torch.equal(whole, trained(range(6)))
    assert torch.equal(whole, trained(range(3), range(3, 6)))
    assert not torch.equal(whole, trained(range(1, 7)))


def test_other_batches_are_not_recorded():
    model = small().train()
    model.fuse(torch.device("cuda"), torch.bfloat16)
    graph_forward(model, 4)
    images = torch.randn(6, 3, 224, 224, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        parts = [model(images[:4]).clone(), model(images[:2]), model(images)]
        model.eval()
        with torch.no_grad():
            expected = model(images)
    for part, count in zip(parts, (4, 2, 6), strict=True):
        np.testing.assert_allclose(
            part.detach().float().cpu(), expected[:count].float().cpu(), atol=0.05
        )


def test_a_model_without_fused_kernels_can_be_recorded():
    model, images = small(injection="every"), torch.randn(8, 3, 224, 224, device="cuda")
    expected = gradients(model, images, torch.bfloat16)
    graph_forward(model, 8)
    for _ in range(2):
        found = gradients(model, images, torch.bfloat16)
        for name, gradient in expected.items():
            assert distance(found[name], gradient) < 1e-2, name


def test_batches_are_the_same_wherever_images_are_kept():
    """Also while the device is busy with something else."""
    device = torch.device("cuda", 0)
    pixels = np.random.default_rng(0).integers(0, 256, (40, 90, 70, 3), dtype=np.uint8)
    source = ArraySource(("a", "b"), np.arange(40) % 2, [f"{i}" for i in range(40)], pixels)
    augment = BatchAugment(Preprocessing(size=(64, 48)), Augment(crop="inception"), seed=0)
    order = ShuffledOrder(source.targets, source.blocks, seed=0)
    sampler = RankBatchSampler(order, batch=16, rank=0, world=1, start=0)
    kept = []
    for place in ("device", "memory", "none"):
        if place == "none":
            dataset = CutImages(source, augment)
            finish = partial(dataset.finish, device=device)
            batches = training_batches(dataset, sampler, workers=1, device=device, finish=finish)
        else:
            where = Devices(device, torch.bfloat16)
            images, _ = decode_images(source, augment, where, place=place, workers=0)
            assert images.pixels.is_cuda == (place == "device")
            batches = decoded_batches(images, augment, source.targets, sampler, device)
        found = []
        for batch in islice(prepared_ahead(batches, device), 6):
            torch.cuda._sleep(100_000_000)
            found.append((batch.images.clone(), batch.targets.clone()))
        kept.append(found)
    for first, *others in zip(*kept, strict=True):
        for other in others:
            assert torch.equal(first[0], other[0])
            assert torch.equal(first[1], other[1])


def test_float8_keeps_features():
    from vitrail.model.kernels.encoder import quantize

    model = small().eval().bfloat16()
    images = torch.randn(8, 3, 224, 224, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        truth = model.features(images).double()
        assert model.fuse(torch.device("cuda"), torch.bfloat16)
        quantize(model.blocks)
        assert distance(model.features(images), truth) < 0.15
