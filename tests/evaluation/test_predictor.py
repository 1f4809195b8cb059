"""Every picture once and in order, on one process or several; what is broken is named."""

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch import multiprocessing, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import vitrail
from tests.evaluation.examples import (
    LABELS,
    evaluate,
    linear,
    pictures,
    predict,
    probabilities,
    tensor,
)
from vitrail import VitrailError
from vitrail.data.dataset import ArraySource, Splits, Subset
from vitrail.data.folder import open_folder
from vitrail.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from vitrail.data.store import equal_images, open_store, pack_data
from vitrail.errors import FailureError
from vitrail.evaluation import predictor
from vitrail.evaluation.metrics import Predictions
from vitrail.evaluation.predictor import ImageBatches
from vitrail.training.objectives.classification import Classification

BROKEN = {0: VitrailError("0.png is not an image"), 4: VitrailError("4.png is truncated")}


def plain(found: Predictions) -> tuple[Any, ...]:
    """What can be compared with ==."""
    numbers = (np.round(column, 6).tolist() for column in (found.probabilities, found.loss))
    return list(found.names), found.targets.tolist(), found.guesses.tolist(), *numbers


@pytest.mark.parametrize("batch", [1, 2, 3, 7, 64])
def test_every_picture_is_answered_once_and_in_order(batch):
    source, model = pictures(7), linear()
    found, broken = predict(model, source, transform=tensor, batch=batch)
    expected = probabilities(model, source)
    assert found.names == list(source.names)
    assert found.targets.tolist() == source.targets.tolist()
    best = expected.topk(5)
    assert found.guesses.tolist() == best.indices.tolist()
    assert np.allclose(found.probabilities, best.values, atol=1e-6)
    truth = expected[torch.arange(7), torch.from_numpy(source.targets)]
    assert np.allclose(found.loss, -truth.log(), atol=1e-5)
    assert broken == []


def test_a_model_trained_with_a_sigmoid_is_measured_with_it():
    source, model = pictures(7), linear()
    model.activation = "sigmoid"
    found, _ = predict(model, source, transform=tensor)
    inputs = torch.stack([tensor(Image.fromarray(pixels)) for pixels in source.pixels])
    logits = model.eval()(inputs.double()).detach()
    best = logits.sigmoid().topk(5)
    assert found.guesses.tolist() == best.indices.tolist()
    assert np.allclose(found.probabilities, best.values, atol=1e-6)
    expected = Classification(nn.Identity(), 6, "sigmoid")(logits, torch.from_numpy(source.targets))
    assert np.allclose(found.loss, expected, atol=1e-5)


def test_workers_change_nothing():
    source, model = pictures(7, errors=BROKEN), linear()
    alone, few = predict(model, source, transform=tensor, batch=2)
    helped, same = predict(model, source, transform=tensor, batch=2, workers=2)
    assert plain(alone) == plain(helped)
    assert few == same


@pytest.mark.parametrize("batch", [1, 3])
def test_broken_pictures_are_named_and_skipped_and_never_replaced(batch):
    model = linear()
    whole, _ = predict(model, pictures(7), transform=tensor)
    found, broken = predict(model, pictures(7, errors=BROKEN), transform=tensor, batch=batch)
    left = [1, 2, 3, 5, 6]
    assert broken == [("0.png", "0.png is not an image"), ("4.png", "4.png is truncated")]
    assert found.names == [f"{i}.png" for i in left]
    assert np.allclose(found.probabilities, whole.probabilities[left], atol=1e-6)
    assert found.targets.tolist() == whole.targets[left].tolist()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_network_that_fails_is_not_a_broken_picture(workers):
    source = pictures(5, errors={3: FailureError("example.org does not answer")})
    with pytest.raises(FailureError, match=r"^example\.org does not answer$"):
        predict(linear(), source, transform=tensor, workers=workers)


def test_a_data_set_without_one_readable_picture_is_one_line():
    source = pictures(2, errors={0: VitrailError("0.png is empty"), 1: VitrailError("no")})
    with pytest.raises(VitrailError, match=r"^no image of pets \(val\) can be read; 0\.png: 0"):
        evaluate(linear(), source, transform=tensor, data="pets", split="val", model_name="m")
    with pytest.raises(VitrailError, match="no images to evaluate"):
        evaluate(linear(), pictures(0), transform=tensor, data="p", split="val", model_name="m")


def test_classes_in_another_order_are_mapped():
    source, model = pictures(40), linear()
    straight, _ = predict(model, source, transform=tensor)
    order = [3, 0, 5, 1, 4, 2]
    turned = linear()
    with torch.no_grad():
        turned[2].weight.copy_(model[2].weight[order])
        turned[2].bias.copy_(model[2].bias[order])
    turned.labels = tuple(LABELS[i] for i in order)
    assert plain(predict(turned, source, transform=tensor)[0]) == plain(straight)


def test_other_classes_are_one_line():
    named = linear()
    named.labels = ("ant", "bee", "cow", "dog", "elk", "fox")
    with pytest.raises(VitrailError, match=r"^this model has 6 classes, pets has 6 \('cat' unk"):
        evaluate(named, pictures(3), transform=tensor, data="pets", split="test", model_name="m")
    with pytest.raises(VitrailError, match=r"^this model has 4 classes, the dataset has 6;"):
        predict(linear(4), pictures(3), transform=tensor)
    headless = vitrail.create("Ti/16", classes=0, size=32, depth=1)
    with pytest.raises(VitrailError, match=r"^this model has no classes"):
        predict(headless, pictures(3), transform=tensor)


def test_a_classifier_uses_its_own_preprocessing_or_says_that_it_has_none():
    model = vitrail.create("Ti/16", classes=6, size=32, depth=1)
    nn.init.normal_(model.head.weight)
    source = pictures(3)
    with pytest.raises(VitrailError, match="no preprocessing"):
        predict(model, source)
    model.preprocess, model.labels = Preprocessing(size=(32, 32)), LABELS
    found, _ = predict(model, source)
    for i in range(3):
        said = model.predict(source.image(i))
        assert [LABELS[guess] for guess in found.guesses[i]] == [name for name, _ in said]
        assert np.allclose(found.probabilities[i], [p for _, p in said], atol=1e-5)


def test_measuring_leaves_no_trace():
    model = linear().train()
    model[0].eval()
    state = torch.get_rng_state()
    predict(model, pictures(5), transform=tensor)
    assert [part.training for part in model] == [False, True, True]
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.requires_grad and not p.is_inference() for p in model.parameters())
    with pytest.raises(VitrailError):
        predict(model, pictures(5, labels=("one",)), transform=tensor)
    assert [part.training for part in model] == [False, True, True]


def test_bfloat16_is_close_and_float32_means_no_autocast():
    source, model = pictures(30), linear()
    expected = probabilities(model, source).topk(5).values.numpy()
    exact, _ = predict(model, source, transform=tensor)
    assert np.abs(exact.probabilities - expected).max() < 1e-12
    single, _ = predict(model.float(), source, transform=tensor, precision=torch.float32)
    assert 1e-9 < np.abs(single.probabilities - expected).max() < 1e-5
    fast, _ = predict(model, source, transform=tensor, precision=torch.bfloat16)
    assert fast.probabilities.dtype == np.float32
    assert 1e-4 < np.abs(fast.probabilities - expected).max() < 0.1


def test_read_only_targets_and_inference_mode_are_fine():
    source, model = pictures(5), linear()
    source.targets.flags.writeable = False
    with torch.inference_mode():
        found, _ = predict(model, source, transform=tensor)
    assert plain(found) == plain(predict(model, source, transform=tensor)[0])


def test_answers_that_are_not_numbers_are_one_line():
    model = linear()
    nn.init.constant_(model[2].bias, torch.nan)
    with pytest.raises(VitrailError, match=r"^the model's output for 0\.png is NaN or infinite"):
        predict(model, pictures(3), transform=tensor)


def test_too_large_a_batch_is_one_line():
    class Greedy(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    with pytest.raises(VitrailError, match=r"^out of memory with 3 images at once; try a smal"):
        predict(Greedy(), pictures(3), transform=tensor)
    with pytest.raises(VitrailError, match=r"^batch = 0: expected"):
        predict(linear(), pictures(3), transform=tensor, batch=0)


def test_progress_reaches_its_total():
    seen = []

    def progress(amount: int, total: int | None = None) -> None:
        seen.append((amount, total))

    predict(linear(), pictures(7, errors=BROKEN), transform=tensor, batch=3, progress=progress)
    assert seen == [(3, 7), (3, 7), (1, 7)]


def test_an_evaluation_is_a_file_that_json_can_hold():
    source = pictures(50, errors=BROKEN)
    result = evaluate(
        linear(), source, transform=tensor, batch=8, data="noise", split="test", model_name="m"
    )
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert result["n"] == 48
    assert (result["data"], result["split"], result["model"]) == ("noise", "test", "m")
    assert result["broken"] == [
        ["0.png", "0.png is not an image"],
        ["4.png", "4.png is truncated"],
    ]
    assert result["seconds"] > 0
    assert len(result["mistakes"]) == min(24, round(48 * (1 - result["top1"])))
    expected = probabilities(linear(), source).argmax(1).numpy() == source.targets
    readable = np.delete(expected, [0, 4])
    assert result["top1"] == pytest.approx(readable.mean())


def test_compiled_models_keep_their_labels():
    model = linear()
    model.labels = LABELS[::-1]
    compiled = torch.compile(model, backend="eager")
    ours, _ = predict(compiled, pictures(9), transform=tensor)
    assert plain(ours) == plain(predict(model, pictures(9), transform=tensor)[0])


CASES = {
    "uneven": (7, {}, 2),
    "one": (1, {}, 2),
    "none": (0, {}, 2),
    "even": (8, {}, 64),
    "broken": (7, BROKEN, 1),
    "all broken on one": (6, {i: VitrailError("bad") for i in (1, 3, 5)}, 2),
}


def answers_to_all() -> dict[str, Any]:
    found = {}
    for name, (n, errors, batch) in CASES.items():
        source = pictures(n, errors=errors)
        answers, broken = predict(linear(), source, transform=tensor, batch=batch)
        found[name] = plain(answers), broken
    return found


def answers_of_wrapped_models() -> dict[str, Any]:
    """Both wrappers talk to the other process in each pass; training must go on afterwards."""
    source = pictures(7, errors=BROKEN | {2: BROKEN[0], 6: BROKEN[0]})
    norm = nn.Sequential(*linear(), nn.BatchNorm1d(len(LABELS), dtype=torch.float64))
    parts, mesh = linear(), dist.init_device_mesh("cpu", (2,))
    fully_shard(parts[2], mesh=mesh)
    wrapped = {"sharded": fully_shard(parts, mesh=mesh), "copied": DistributedDataParallel(norm)}
    found = {}
    for name, model in wrapped.items():
        answers, _ = predict(model, source, transform=tensor, batch=1)
        model(torch.randn(2, 3, 4, 6, dtype=torch.float64)).sum().backward()
        found[name] = plain(answers)
    return found


def in_a_group(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{folder / 'meeting'}"
    patience = timedelta(minutes=2)  # processes that wait for each other in vain are a failure
    dist.init_process_group("gloo", meeting, patience, world_size=2, rank=rank)
    try:
        found = answers_to_all(), answers_of_wrapped_models()
    finally:
        dist.destroy_process_group()
    torch.save(found, folder / f"{rank}.pt")


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> list[Any]:
    """What each of two processes found."""
    folder = tmp_path_factory.mktemp("group")
    multiprocessing.start_processes(in_a_group, (folder,), nprocs=2, start_method="spawn")
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def test_two_processes_count_every_picture_once(both):
    (first, _), (second, _) = both
    assert first == second == answers_to_all()
    counted = {name: len(names) for name, ((names, *_), _) in first.items()}
    assert counted == {
        **{"uneven": 7, "one": 1, "none": 0, "even": 8},
        **{"broken": 5, "all broken on one": 3},
    }


def test_wrapped_models_are_measured_together_and_trained_afterwards(both):
    (_, first), (_, second) = both
    source = pictures(7, errors=BROKEN | {2: BROKEN[0], 6: BROKEN[0]})
    assert first == second
    assert first["sharded"] == plain(predict(linear(), source, transform=tensor)[0])
    assert first["copied"][0] == ["1.png", "3.png", "5.png"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_same_answers():
    source, model = pictures(50, errors=BROKEN), linear().float()
    expected, broken = predict(model, source, transform=tensor)
    found, same = predict(model.cuda(), source, transform=tensor, batch=8, workers=2)
    assert np.allclose(found.probabilities, expected.probabilities, atol=1e-3)
    assert found.names == expected.names
    assert same == broken
    fast, _ = predict(model, source, transform=tensor, precision=torch.bfloat16)
    assert np.allclose(fast.probabilities, expected.probabilities, atol=0.1)


def test_it_says_of_pictures_what_the_model_says_itself(checkpoint, scenes):
    model = vitrail.load(checkpoint)
    size = (240, 320)
    source = ArraySource(
        labels=model.labels,
        targets=np.array([985, 985, 985]),
        names=["a", "b", "c"],
        pixels=np.stack([np.asarray(scene.resize(size[::-1])) for scene in scenes[:3]]),
    )
    found, _ = predict(model, source)
    for i in range(3):
        names, sure = zip(*model.predict(source.image(i)), strict=True)
        assert tuple(source.labels[guess] for guess in found.guesses[i]) == names
        assert np.allclose(found.probabilities[i], sure, atol=1e-5)


def test_processes_decode_by_default_where_they_pay(monkeypatch):
    monkeypatch.setattr(predictor, "decoding_processes", lambda device: 2)
    source = pictures(100)

    def workers(**options) -> int:
        batches = ImageBatches(source, tensor, torch.device("cpu"), **options)
        return batches._loader.num_workers

    assert workers(batch=10) == 2
    assert workers(batch=40) == 2
    assert workers(batch=64) == 1
    assert workers(batch=101) == 0
    assert workers(batch=101, workers=2) == 2
    assert workers(batch=10, workers=0) == 0
    monkeypatch.undo()
    assert workers(batch=10) == 0  # on a CPU


@pytest.mark.parametrize(("keep", "passes"), [(1 << 20, 1), (1000, 2), (0, 2)])
def test_what_fits_is_prepared_once(keep, passes):
    source, prepared = pictures(25), []

    def counted(image) -> torch.Tensor:
        prepared.append(image)
        return tensor(image)

    batches = ImageBatches(source, counted, torch.device("cpu"), batch=10, workers=0, keep=keep)
    first, second = ([part.pixels.clone() for part in batches] for _ in range(2))
    assert [len(part) for part in second] == [10, 10, 5]
    assert torch.equal(torch.cat(first), torch.cat(second))
    assert len(prepared) == 25 * passes


@pytest.mark.parametrize(("keep", "kind"), [(0, "cpu"), (1 << 20, "meta")])
def test_only_what_is_kept_is_moved_to_the_device(keep, kind):
    """A cache of features identifies images by their bytes in memory."""
    device = torch.device("meta")
    batches = ImageBatches(pictures(5), tensor, device, batch=2, workers=0, keep=keep)
    assert {part.pixels.device.type for part in batches} == {kind}


@pytest.mark.parametrize(
    ("size", "options", "together"),
    [
        ((8, 6), {"size": (8, 6)}, True),
        ((8, 6), {"size": (8, 6), "mean": IMAGENET_MEAN, "std": IMAGENET_STD}, True),
        ((8, 8), {"size": (8, 8), "short_side": 9}, False),
        ((8, 6), {"size": (6, 8)}, False),
        ((8, 6), {"size": (8, 6), "mean": (0.5,), "std": (0.5,)}, False),
    ],
)
def test_images_of_a_store_that_are_only_normalized_are_read_together(
    size, options, together, tmp_path
):
    pixels = np.random.default_rng(0).integers(0, 256, (9, *size, 3), dtype=np.uint8)
    packed = ArraySource(("a", "b"), np.arange(9) % 2, [f"{i}" for i in range(9)], pixels)
    pack_data(Splits(name="some", train=packed), tmp_path / "store")
    source = Subset(open_store(tmp_path / "store").part("train"), np.array([7, 2, 2, 5, 0]))
    transform = Preprocessing(**options)
    batches = ImageBatches(source, transform, torch.device("cpu"), batch=2, workers=1)
    assert batches._loader.num_workers == (0 if together else 1)
    parts = list(batches)
    assert torch.cat([part.indices for part in parts]).tolist() == [0, 1, 2, 3, 4]
    expected = torch.stack([transform(source.image(i)) for i in range(5)])
    assert torch.equal(torch.cat([part.pixels for part in parts]), expected)


def test_images_of_several_sizes_are_read_one_by_one(tmp_path):
    for number, size in enumerate([(8, 8), (8, 8), (6, 8)]):
        folder = tmp_path / "images" / ("b" if number else "a")
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size).save(folder / f"{number}.png")
    images = open_folder(tmp_path / "images")
    pack_data(images, tmp_path / "store")
    source = open_store(tmp_path / "store").part("train")
    assert equal_images(images.part("train")) is None
    assert equal_images(source) is None
    assert equal_images(Subset(source, np.array([0, 1]))) is None  # other images differ
