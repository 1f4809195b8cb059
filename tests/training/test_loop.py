import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from vitrail import devices
from vitrail.config import load_config
from vitrail.data.loader import TrainingBatch
from vitrail.devices import Devices, graph_forward
from vitrail.errors import FailureError, out_of_memory
from vitrail.training.build import build_schedule
from vitrail.training.checkpoint import TrainState
from vitrail.training.loop import DivergedError, Loop
from vitrail.training.optim import Schedule

CPU = Devices(torch.device("cpu"), torch.float32)


class Squares(nn.Module):
    """Learns to give zero; runs out of memory with more images than fit."""

    def __init__(self, fits: int = 1000) -> None:
        super().__init__()
        self.model = nn.Linear(4, 1)
        self.fits = fits
        self.seen: list[int] = []

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        self.seen.append(len(inputs))
        if len(inputs) > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self.model(inputs)[:, 0].square() + 0 * targets

    def prepare(self, batch: TrainingBatch, rows: slice) -> tuple[Tensor, Tensor]:
        return batch.images[rows], batch.targets[rows]


def batches(n: int = 16) -> Iterator[TrainingBatch]:
    chance = torch.Generator().manual_seed(0)
    while True:
        images = torch.randn(n, 4, generator=chance)
        yield TrainingBatch(images=images, targets=torch.zeros(n, dtype=torch.int64))


def loop(task: Squares, *, lr: float = 0.05, steps: int = 8, **options) -> Loop:
    optimizer = torch.optim.SGD(task.parameters(), lr=lr, momentum=0.9)
    return Loop(
        state=TrainState(task, optimizer, None, torch.amp.GradScaler("cpu", enabled=False)),
        devices=CPU,
        schedule=Schedule(steps=steps, peak=lr, warmup=2),
        batch=16,
        clip=1.0,
        seed=0,
        microbatch=options.get("microbatch", 0),
    )


def trained(task: Squares, **options) -> tuple[Loop, list[float]]:
    torch.manual_seed(0)
    nn.init.normal_(task.model.weight)
    nn.init.zeros_(task.model.bias)
    run = loop(task, **options)
    losses: list[float] = []

    def note(loop: Loop, batch: TrainingBatch) -> bool:
        losses.append(loop.loss.item())
        return False

    run.run(batches(), note)
    return run, losses


def test_the_loss_falls():
    run, losses = trained(Squares(), steps=40)
    assert run.state.counters.step == len(losses) == 40
    assert losses[-1] < losses[0] / 4


def test_parts_of_a_batch_add_up_to_the_whole():
    whole, _ = trained(Squares())
    parts, _ = trained(Squares(), microbatch=5)
    torch.testing.assert_close(whole.state.wrapped.model.weight, parts.state.wrapped.model.weight)


def test_out_of_memory_halves_what_is_done_at_once_and_repeats_the_update():
    task = Squares(fits=5)
    run, losses = trained(task)
    assert run.microbatch == 4
    assert task.seen[:6] == [16, 8, 4, 4, 4, 4]
    plain, expected = trained(Squares())
    assert losses == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(run.state.wrapped.model.weight, plain.state.wrapped.model.weight)


def test_out_of_memory_frees_recorded_graphs():
    task = Squares(fits=5)
    task.forward = task.forward  # as graph_forward does
    trained(task, steps=1)
    assert "forward" not in vars(task)


@pytest.mark.parametrize(
    "message", ["CUDA out of memory", "operation failed due to a previous error during capture"]
)
def test_a_recording_that_runs_out_of_memory_is_reported_and_left_out(message, monkeypatch, capsys):
    def fails(*_arguments):
        raise RuntimeError(message)

    monkeypatch.setattr(devices, "_recorded", fails)
    task, plain = Squares(), Squares()
    graph_forward(task, 16)
    run, losses = trained(task, steps=3)
    assert losses == trained(plain, steps=3)[1]
    assert run.microbatch == 0
    assert capsys.readouterr().err == f"graphs   not recorded: {message}\n"


def test_other_errors_of_a_recording_are_raised(monkeypatch):
    def fails(*_arguments):
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(devices, "_recorded", fails)
    task = Squares()
    graph_forward(task, 16)
    with pytest.raises(RuntimeError, match="shapes differ"):
        trained(task, steps=1)


def test_out_of_memory_while_a_batch_is_prepared_halves_what_is_prepared():
    prepared: list[int] = []

    class Greedy(Squares):
        def prepare(self, batch: TrainingBatch, rows: slice) -> tuple[Tensor, Tensor]:
            prepared.append(rows.stop - rows.start)
            if prepared[-1] > 5:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().prepare(batch, rows)

    run, _ = trained(Greedy(), steps=1)
    assert prepared == [16, 8, 4, 4, 4, 4]
    assert run.microbatch == 4


def test_a_processor_out_of_memory_is_known_by_what_it_says():
    with pytest.raises(RuntimeError) as found:
        torch.empty(1 << 60)
    assert out_of_memory(found.value)


def test_a_single_image_that_does_not_fit_is_one_line():
    with pytest.raises(FailureError, match=r"out of memory with 1 image.*smaller model"):
        trained(Squares(fits=0))


def test_another_error_is_not_mistaken_for_a_full_memory():
    class Wrong(Squares):
        def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
            raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        trained(Wrong())


def test_a_blank_batch_changes_nothing():
    runs = {}
    for blank in (None, TrainingBatch(images=torch.ones(16, 4), targets=torch.zeros(16).long())):
        torch.manual_seed(0)
        task, at_first = Squares(), []
        run = loop(task)

        def loaded(task: Squares = task, seen: list[int] = at_first) -> Iterator[TrainingBatch]:
            seen.extend(task.seen)
            yield from batches()

        run.run(loaded(), lambda *_: False, blank)
        assert at_first == ([] if blank is None else [16])
        runs[blank is None] = run.state.wrapped.model.weight
    assert torch.equal(*runs.values())


def test_after_step_ends_a_run():
    run = loop(Squares(), steps=100)
    run.run(batches(), lambda loop, batch: loop.state.counters.step == 3)
    assert run.state.counters.step == 3


def test_gradients_are_clipped_to_the_norm():
    task = Squares()
    with torch.no_grad():
        task.model.weight.fill_(100.0)
    run = loop(task, lr=1.0, steps=1000)
    before = task.model.weight.detach().clone()
    run.state.counters.step = 10  # past the warm-up
    run.step(next(batches()))
    assert run.norm > 1
    moved = (task.model.weight - before).norm().item()
    assert moved <= 1.0 + 1e-5


def test_a_loss_that_is_no_number_is_told_with_the_step():
    run = loop(Squares())
    run.loss = torch.tensor(math.nan)
    run.state.counters.step = 812
    with pytest.raises(DivergedError, match=r"loss is nan at step 812; try a lower optim.lr"):
        run.check_finite()


def test_a_time_budget_ends_at_its_last_step():
    schedule = Schedule(seconds=10.0, peak=0.1)
    assert schedule.total_steps(2, 5.0) == 4
    assert schedule.total_steps(3, 16.0) == 3  # and not 3/2


def test_a_time_budget_counts_what_came_before_the_first_update():
    config = load_config(None, ["train.minutes=0.5"])
    assert build_schedule(config, images=100, prepared=12.0).done(1, 9.0) == 0.5
    assert build_schedule(config, images=100, prepared=60.0).seconds == 3.0
    in_steps = load_config(None, ["train.steps=5"])
    assert build_schedule(in_steps, 100, prepared=60.0) == build_schedule(in_steps, 100)
