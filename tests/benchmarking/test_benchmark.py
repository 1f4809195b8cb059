"""Every figure of a benchmark, on small models and small budgets."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

import vitrail
from tests.models import small
from vitrail import devices
from vitrail.benchmarking import measure
from vitrail.benchmarking.benchmark import GIB, BenchmarkOptions, benchmark, show
from vitrail.benchmarking.measure import (
    MAX_BATCH,
    Timing,
    Workload,
    _enough,
    _next_batch,
    attempt,
    extrapolated_batch,
    largest_batch,
    time_batches,
)
from vitrail.benchmarking.peers import compare_with_timm, timm_name
from vitrail.devices import Devices, available_memory
from vitrail.errors import FailureError, VitrailError
from vitrail.model.variants import NAMED, parse_variant, variant_name

CPU = Devices(torch.device("cpu"), torch.float32)
QUICK = {"device": "cpu", "batches": (1, 2), "seconds": 0.2}


@pytest.fixture(autouse=True)
def no_collection(monkeypatch):
    """Collecting the garbage of a whole test session takes a second, before every try."""
    monkeypatch.setattr(devices.gc, "collect", lambda: 0)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    vitrail.save(small("vit"), path)
    return path


class Hungry(torch.nn.Module):
    """A model on a device that holds so many images and no more."""

    def __init__(self, holds: int, error: RuntimeError | None = None) -> None:
        super().__init__()
        self.holds = holds
        self.error = error or torch.OutOfMemoryError("CUDA out of memory")
        self.tried: list[int] = []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.tried.append(len(images))
        if len(images) > self.holds:
            raise self.error
        return images.mean((2, 3))


def hungry(holds: int, error: RuntimeError | None = None) -> Workload:
    return Workload(Hungry(holds, error), CPU, (3, 1, 1))


TOO_MANY = {
    "integer out of range": "kernel",
    "GET was unable to find an engine to execute this computation": "kernel",
    "CUDA error: invalid configuration argument": "kernel",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`": "memory",
    "HIP out of memory. Tried to allocate 2.00 GiB": "memory",
}
"""What a GPU says of a batch that is too large."""


def test_one_model_at_its_own_size_has_its_figures_at_the_top(weights):
    result = benchmark([weights], **QUICK)
    assert result["images_per_second"] > 0
    assert result["batch"] in (1, 2)
    assert (result["device"], result["precision"]) == ("cpu", "float32")
    assert result["peak_memory_bytes"] > 50e6
    assert result["gmacs"] > 0
    assert result["latency_ms"] > 0
    assert result["size"] == [64, 64]
    (row,) = result["results"]
    assert [one["batch"] for one in row["batches"]] == [1, 2]
    best = max(row["batches"], key=lambda one: one["images_per_second"])
    assert best["images_per_second"] == row["images_per_second"]
    assert "peer" not in row


def test_every_model_is_measured_at_every_size_forward_and_backward(weights, capsys):
    result = benchmark([weights, "R+Ti/16"], sizes=(32, 64), train=True, **QUICK)
    told = [(row["variant"], row["size"]) for row in result["results"]]
    assert told == [
        *(("ViT 2x192/16", [32, 32]), ("ViT 2x192/16", [64, 64])),
        *(("R+Ti/16", [32, 32]), ("R+Ti/16", [64, 64])),
    ]
    assert result["mode"] == "training"
    assert "images_per_second" not in result
    costs = [row["gmacs"] for row in result["results"]]
    assert costs[0] < costs[1]
    show(result)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7
    assert lines[0].endswith("training")
    assert "extrapolated" in lines[-1]


def test_timm_is_timed_beside_ours(capsys):
    result = benchmark(["S/32", "Axial-R26"], sizes=(64,), peers=True, **QUICK)
    peer, none = (row["peer"] for row in result["results"])
    assert peer["name"] == "vit_small_patch32_224"
    assert peer["library"].startswith("timm ")
    assert 0.2 < peer["ratio"] < 5
    by_turns = peer["ours_images_per_second"] / peer["images_per_second"]
    assert 0.5 < by_turns / peer["ratio"] < 2
    assert none == {"missing": "timm has no such model"}
    show(result)
    shown = capsys.readouterr().out
    for figure in ("ours_images_per_second", "images_per_second"):
        assert f"{peer[figure]:,.1f}" in shown
    assert "timm alternating" in shown
    assert "Axial-R26: no comparison with timm: timm has no such model" in shown


def test_why_there_is_no_peer_is_told(monkeypatch):
    architecture = parse_variant("S/32")
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "timm", None)
        found = compare_with_timm(hungry(9), architecture, 4, 0.1)
        assert found == {"missing": "timm is not installed"}
    full = compare_with_timm(hungry(3), architecture, 4, 0.1)
    assert full == {"missing": "out of memory at batch size 4 with both models"}
    none = compare_with_timm(hungry(3, RuntimeError("integer out of range")), architecture, 4, 0.1)
    assert none == {"missing": "no kernel for batch size 4 with both models"}
    wrong = compare_with_timm(hungry(3, RuntimeError("no such thing")), architecture, 4, 0.1)
    assert wrong == {"missing": "vit_small_patch32_224 failed (no such thing)"}


def test_a_peer_that_does_not_fit_at_all_costs_us_nothing(monkeypatch):
    timm = pytest.importorskip("timm")

    class Heavy(torch.nn.Module):
        def to(self, *wanted):
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(timm, "create_model", lambda *words, **more: Heavy())
    found = compare_with_timm(hungry(9), parse_variant("S/32"), 4, 0.1)
    assert found == {"missing": "out of memory at batch size 4 with both models"}


def test_what_fails_has_its_row_and_the_others_have_theirs(weights, capsys):
    result = benchmark(["S/32", "no-such-model", weights], sizes=(8, 64), **QUICK)
    errors = [row.get("error", "") for row in result["results"]]
    assert [bool(error) for error in errors] == [True, False, True, True, True, False]
    assert result["results"][1]["images_per_second"] > 0
    show(result)
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("S/32") for line in lines) == 2
    assert f"S/32 at 8 pixels: {errors[0]}" in lines


def test_a_device_that_fails_on_one_model_goes_on_with_the_next(weights):
    def fail(module, inputs):
        if isinstance(module, vitrail.Classifier) and variant_name(module.architecture) == "S/32":
            raise RuntimeError("CUDA error: unspecified launch failure\nCompile with …")

    hook = register_module_forward_pre_hook(fail)
    try:
        result = benchmark(["S/32", weights], sizes=(64,), **QUICK)
        with pytest.raises(FailureError, match=r"^CUDA error: unspecified launch failure$"):
            benchmark(["S/32"], sizes=(64,), **QUICK)
    finally:
        hook.remove()
    failed, other = result["results"]
    assert failed == {
        "model": "S/32",
        "size": 64,
        "error": "CUDA error: unspecified launch failure",
    }
    assert other["images_per_second"] > 0


def test_nothing_that_works_is_an_error_as_before():
    with pytest.raises(VitrailError, match="no-such-model") as caught:
        benchmark(["no-such-model"], **QUICK)
    assert caught.value.exit_code == 2


def test_batch_norms_learn_from_two_images_at_least():
    result = benchmark(["ResNet18"], sizes=(32,), train=True, device="cpu", seconds=0.2)
    assert result["batches"][0]["batch"] == 2
    assert result["latency_ms"] is None
    show(result)
    with pytest.raises(VitrailError, match="--batches 1: batch norm needs 2 images"):
        benchmark(["ResNet18"], sizes=(32,), train=True, **QUICK)
    assert benchmark(["ResNet18"], sizes=(32,), **QUICK)["latency_ms"] > 0


def test_blocks_are_as_long_as_they_are_said_to_be(monkeypatch):
    clock = [0.0]
    blocks: list[int] = [0]

    def call() -> None:
        clock[0] += 0.75 * measure.BLOCK_SECONDS
        blocks[0] += 1

    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    rounds = measure.interleaved_seconds([call], CPU, 0.0)
    assert len(rounds) == measure.ROUNDS[0]
    assert blocks[0] == 2 + 2 * len(rounds)  # two before, to know how long one takes


def test_the_verb_prints_one_json_value(weights):
    words = ["benchmark", weights, "--batches", "1", "--seconds", 0.1, "--device", "cpu", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "vitrail", *map(str, words)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    wanted = {"images_per_second", "batch", "device", "precision", "peak_memory_bytes", "gmacs"}
    assert wanted <= set(result)


def test_timm_has_the_models_it_is_said_to_have():
    timm = pytest.importorskip("timm")
    theirs = {one: timm_name(parse_variant(one)) for one in NAMED}
    found = {one for one, peer in theirs.items() if peer and timm.is_model(peer)}
    assert found >= {
        *("Ti/16", "S/32", "S/16", "B/32", "B/16", "B/8", "L/32", "L/16", "H/14"),
        *("R26+S/32", "R50+B/16", "R50+L/32", "R50x1", "R50x3", "R101x1", "R152x2", "R152x4"),
        *("ResNet18", "ResNet152"),
    }
    assert theirs["Axial-B/16"] == theirs["R+Ti/16"] == theirs["b/32"] == ""


CAPACITY = 140 * 10**9


def timed(*batches: int, each: int = 0, base: int = 10**9) -> list[Timing]:
    """Measured batches of a model that takes so many bytes for each image."""
    return [Timing(batch, 1e-6 * batch, base + each * batch) for batch in batches]


@pytest.mark.parametrize("holds", [1, 5, 37, 1000])
def test_the_largest_batch_is_found_without_a_prediction(holds):
    work = hungry(holds)
    found, by = largest_batch(work, timed(1), seconds=60.0)
    assert by == "memory"
    assert 0.98 * holds <= found <= holds
    assert len(work.model.tried) < 25


@pytest.mark.parametrize(
    ("wrong", "tries"), [(0.0, 2), (0.02, 6), (-0.02, 6), (0.3, 14), (-0.3, 14)]
)
@pytest.mark.parametrize("each", [10_000_000, 70_000_000, 10**9, 30 * 10**9])
def test_two_batches_predict_the_largest(monkeypatch, each, wrong, tries):
    """`wrong` is by how much more can be held than predicted."""
    monkeypatch.setattr(measure, "_capacity", lambda device: CAPACITY)
    holds = int((1 + wrong) * (CAPACITY - 10**9) / each)
    work = hungry(holds)
    found, by = largest_batch(work, timed(1, 2, each=each), seconds=60.0)
    assert by == "memory"
    assert found <= holds <= found + max(1, found // 100)
    assert len(work.model.tried) <= tries


def test_a_prediction_beyond_the_limit_tries_the_limit(monkeypatch):
    monkeypatch.setattr(measure, "_capacity", lambda device: CAPACITY)
    work = hungry(MAX_BATCH)
    assert largest_batch(work, timed(1, 2, each=1000), seconds=60.0) == (MAX_BATCH, "limit")
    assert work.model.tried == [MAX_BATCH]


def test_the_search_ends_at_the_limit_and_with_the_time(monkeypatch):
    assert largest_batch(hungry(MAX_BATCH), timed(1), seconds=60.0) == (MAX_BATCH, "limit")
    assert largest_batch(hungry(100), timed(4), seconds=0.0) == (4, "time")
    monkeypatch.setattr(measure, "_capacity", lambda device: CAPACITY)
    work = hungry(100)
    found = largest_batch(work, timed(2, 4, each=10**9), seconds=0.0)
    assert (found, work.model.tried) == ((139, "extrapolation"), [])


@pytest.mark.parametrize(("said", "lacks"), TOO_MANY.items())
def test_a_batch_beyond_what_kernels_count_does_not_fit_either(said, lacks):
    found, by = largest_batch(hungry(37, RuntimeError(said)), timed(1), seconds=60.0)
    assert (found, by) == (37, lacks)
    tried, ended = time_batches(hungry(3, RuntimeError(said)), (), 60.0, 0)
    assert ([one.batch for one in tried], ended) == ([1, 2], lacks)
    words = {"kernel": "no kernel for batch size 8", "memory": "out of memory at batch size 8"}
    with pytest.raises(FailureError, match=words[lacks]):
        time_batches(hungry(3, RuntimeError(said)), (8,), 60.0, 0)


def test_only_a_batch_that_is_too_large_is_forgiven():
    def wrong() -> None:
        raise RuntimeError("sizes do not match")

    with pytest.raises(RuntimeError, match="sizes do not match"):
        attempt(wrong)


def test_batches_grow_until_memory_ends_or_larger_ones_are_no_faster():
    found, by = time_batches(hungry(3), (), 60.0, 0)
    assert ([one.batch for one in found], by) == ([1, 2], "memory")
    found, by = time_batches(hungry(7), (1, 4, 8, 16), 60.0, 0)
    assert ([one.batch for one in found], by) == ([1, 4], "memory")
    with pytest.raises(FailureError, match="out of memory at batch size 8"):
        time_batches(hungry(3), (8,), 60.0, 0)
    flat = [Timing(batch, batch / 100, 0) for batch in (1, 2, 4, 8)]
    assert _enough(flat, 16, 60.0) == "level"
    assert not _enough(flat[:3], 8, 60.0)
    assert not _enough([*flat[:3], Timing(8, 0.04, 0)], 16, 60.0)


def test_batches_are_quadrupled_while_the_device_is_idle():
    idle = [Timing(batch, 0.01, 0) for batch in (1, 2, 8)]
    busy = [*idle, Timing(32, 0.03, 0)]
    assert [_next_batch(idle[:n], (), 1000) for n in (1, 2, 3)] == [2, 8, 32]
    assert _next_batch(busy, (), 1000) == 64
    assert _next_batch(idle, (), 32) == 16  # 32 did not fit
    assert _next_batch(idle, (), 16) == 0
    assert [_next_batch(idle[:n], (1, 2, 8), 1000) for n in (1, 2, 3)] == [2, 8, 0]
    assert _next_batch([], (4, 8), 4) == 0


@pytest.mark.parametrize(("slow", "by", "largest"), [(0.0, "limit", MAX_BATCH), (0.1, "time", 4)])
def test_every_doubling_gets_its_share_of_the_time(monkeypatch, slow, by, largest):
    clock = SimpleNamespace(now=0.0)

    def timed(work: Workload, batch: int, budget: float) -> Timing:
        clock.now += budget + slow
        return Timing(batch, (0.0001 + slow) * batch**0.5, 0)

    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(measure, "_time_batch", timed)
    found, ended = time_batches(hungry(MAX_BATCH), (), 2.0, 0)
    assert (found[-1].batch, ended) == (largest, by)


def test_a_peak_that_the_time_cut_short_is_told_as_a_lower_bound(weights, capsys):
    show(benchmark([weights], device="cpu", seconds=0.001))
    row = capsys.readouterr().out.splitlines()[2]
    assert "or more" in row.split("GiB")[0]
    result = benchmark([weights], **QUICK)
    assert result["peak_by"] == "batches"
    show(result)
    assert "or more" not in capsys.readouterr().out


def test_a_processor_stays_within_its_budget(monkeypatch):
    peaks = iter([100, 200, 400, 800])
    monkeypatch.setattr(measure, "peak_memory", lambda device: next(peaks))
    found, by = time_batches(hungry(1000), (1, 2, 4, 8), 60.0, max_bytes=700)
    assert ([one.batch for one in found], by) == ([1, 2, 4], "memory")
    assert extrapolated_batch(found, max_bytes=700) == (7, "extrapolation")
    assert extrapolated_batch(found[:1], max_bytes=700) == (None, "unknown")


def test_a_batch_beyond_the_budget_is_refused_before_it_is_tried(monkeypatch):
    peaks = iter([100, 200])
    monkeypatch.setattr(measure, "peak_memory", lambda device: next(peaks))
    work = hungry(1000)
    with pytest.raises(FailureError, match=r"out of memory at batch size 64 .* within"):
        time_batches(work, (64,), 60.0, max_bytes=700)
    assert max(work.model.tried) == 2


def test_the_budget_is_half_of_what_is_free_or_what_is_given(weights):
    assert 0 < available_memory() < 4096 * GIB
    result = benchmark([weights], device="cpu", batches=(1,), seconds=0.1, memory=2.0)
    assert result["memory_budget_bytes"] == 2 * GIB
    assert [one["batch"] for one in result["batches"]] == [1]


def test_models_of_other_depths_are_built(weights):
    result = benchmark(["Ti/16"], sizes=(32,), depths=(1, 3), **QUICK)
    assert [row["depth"] for row in result["results"]] == [1, 3]
    shallow, deep = (row["parameters"] for row in result["results"])
    assert deep > shallow
    with pytest.raises(VitrailError, match="is not a variant"):
        benchmark([weights], depths=(3,), **QUICK)


def test_several_processes_need_batches_they_can_share(weights, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    with pytest.raises(VitrailError, match="several processes need --batches"):
        benchmark([weights], device="cpu")
    with pytest.raises(VitrailError, match="--batches 3: not divisible by 2 processes"):
        benchmark([weights], device="cpu", batches=(2, 3))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"sizes": (0,)}, "--sizes 0"),
        ({"batches": (1 << 20,)}, "at most 32768"),
        ({"seconds": 0.0}, "--seconds"),
    ],
)
def test_wishes_that_cannot_be_granted_are_named(options, complaint):
    with pytest.raises(VitrailError, match=complaint):
        BenchmarkOptions(**options)
    with pytest.raises(VitrailError, match="no model to measure"):
        benchmark([])
