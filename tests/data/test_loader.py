import os
from itertools import islice

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.pictures import write_classes
from vitrail.data.dataset import ArraySource, Broken
from vitrail.data.folder import open_folder
from vitrail.data.loader import (
    CHUNK,
    Augmented,
    RankBatchSampler,
    ShuffledOrder,
    read_all,
    training_batches,
)
from vitrail.errors import FailureError, VitrailError

CPU = torch.device("cpu")


def zeros(n: int) -> np.ndarray:
    return np.zeros(n, dtype=np.int64)


def source(n: int = 10) -> ArraySource:
    pixels = np.arange(n, dtype=np.uint8)[:, None, None].repeat(4, 1).repeat(4, 2)
    targets = np.arange(n, dtype=np.int64) % 2
    return ArraySource(("even", "odd"), targets, [f"{i}" for i in range(n)], pixels)


def noisy(pixels: np.ndarray) -> torch.Tensor:
    """The picture's gray value and a random number."""
    value = torch.tensor(pixels[0, 0, 0], dtype=torch.float32)
    return torch.stack([value, torch.rand(())])


def test_each_pass_holds_every_picture_once_in_another_order():
    stream = ShuffledOrder(zeros(10), zeros(10), seed=0)
    first, second = ([stream[i] for i in range(k, k + 10)] for k in (0, 10))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


def test_another_seed_gives_another_order():
    orders = {tuple(ShuffledOrder(zeros(20), zeros(20), seed=s).permutation(0)) for s in range(5)}
    assert len(orders) == 5


def test_shards_are_read_in_windows():
    blocks = np.repeat(np.arange(64), 10)
    order = ShuffledOrder(np.zeros(640, dtype=np.int64), blocks, seed=0).permutation(0)
    assert sorted(order) == list(range(640))
    for start in range(0, 640, 160):  # 16 blocks of 10
        assert len(set(blocks[order[start : start + 160]])) == 16


def test_balanced_sampling_draws_every_class_equally_often():
    targets = np.array([0] * 90 + [1] * 9 + [2])
    order = ShuffledOrder(targets, zeros(100), seed=0, balanced=True).permutation(0)
    counts = np.bincount(targets[order])
    assert len(order) == 100
    assert counts.min() >= 33
    assert counts.max() <= 34
    assert len(set(order[targets[order] == 1])) == 9  # all of a small class, some of them again


def batches(start: int, steps: int, *, workers: int = 0, rank: int = 0, world: int = 1):
    dataset = Augmented(source(), noisy, seed=1)
    stream = ShuffledOrder(dataset.targets, zeros(10), seed=1)
    share = RankBatchSampler(stream, batch=4, rank=rank, world=world, start=start)
    found = training_batches(dataset, share, workers=workers, device=CPU)
    return torch.stack([batch.images for batch in islice(found, steps)])


def test_starting_later_is_going_on():
    whole = batches(0, 6)
    assert torch.equal(batches(3, 3), whole[3:])


def test_workers_change_nothing():
    assert torch.equal(batches(0, 5, workers=2), batches(0, 5))


def test_two_processes_share_the_batches_of_one():
    whole = batches(0, 5)
    halves = [batches(0, 5, rank=rank, world=2) for rank in (0, 1)]
    assert torch.equal(torch.cat(halves, dim=1), whole)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_any_rows_come_with_the_image_before_them_in_the_batch_of_all_processes(world):
    whole = batches(2, 1)[0]
    for rank in range(world):
        dataset = Augmented(source(), noisy, seed=1)
        stream = ShuffledOrder(dataset.targets, zeros(10), seed=1)
        share = RankBatchSampler(stream, batch=4, rank=rank, world=world, start=2, mixing=True)
        batch = next(training_batches(dataset, share, workers=0, device=CPU))
        size = 4 // world
        assert len(batch) == size
        assert batch.first == 8 + rank * size
        for start in range(size):
            images, targets = batch.preceded(slice(start, size))
            mine = range(rank * size + start, (rank + 1) * size)
            expected = whole[[*mine, mine[0] - 1]]
            assert torch.equal(images, expected)
            assert torch.equal(targets, expected[:, 0].long() % 2)


def test_a_picture_is_varied_differently_in_every_pass():
    whole = batches(0, 5).reshape(20, 2)
    chances = {float(value): [] for value in range(10)}
    for value, chance in whole.tolist():
        chances[value].append(chance)
    assert all(len(set(pair)) == 2 for pair in chances.values())


def test_loading_leaves_the_global_random_state_alone():
    torch.manual_seed(7)
    before = torch.get_rng_state()
    batches(0, 1)
    assert torch.equal(torch.get_rng_state(), before)


class Damaged(ArraySource):
    """A source in which pictures from the eighth on cannot be decoded."""

    def rgb(self, index: int, side: int) -> np.ndarray:
        if index >= 8:
            raise VitrailError(f"{index} cannot be decoded")
        return super().rgb(index, side)


def test_a_broken_picture_is_named_and_the_next_takes_its_place():
    whole = source()
    damaged = Damaged(whole.labels, whole.targets, whole.names, whole.pixels)
    dataset = Augmented(damaged, noisy, seed=0)
    share = RankBatchSampler(
        ShuffledOrder(dataset.targets, zeros(10), seed=0), batch=10, rank=0, world=1, start=0
    )
    batch = next(iter(training_batches(dataset, share, workers=0, device=CPU)))
    assert len(batch.images) == 10
    assert {name for name, _ in batch.broken} == {"8", "9"}
    assert batch.images[:, 0].max() == 7
    assert (batch.images[:, 0].long() % 2 == batch.targets).all()


def test_nothing_but_broken_pictures_is_an_error():
    whole = source()
    damaged = Damaged(whole.labels, whole.targets[8:], whole.names[8:], whole.pixels[8:])

    class Hopeless(Damaged):
        def rgb(self, index: int, side: int) -> np.ndarray:
            return super().rgb(index + 8, side)

    dataset = Augmented(
        Hopeless(damaged.labels, damaged.targets, damaged.names, damaged.pixels), noisy, seed=0
    )
    with pytest.raises(VitrailError, match="none of the 2 training images"):
        _ = dataset[0, 0]


# Every image once, by one process or several.


def width_and_process(image: Image.Image) -> tuple[int, int]:
    return image.width, os.getpid()


def die(image: Image.Image) -> None:
    os._exit(1)


def test_several_processes_see_what_one_sees(tmp_path):
    source = open_folder(write_classes(tmp_path, {"a": CHUNK, "b": 5})).train
    (tmp_path / "a" / "3.png").write_bytes(b"no image")
    steps: list[int] = []
    alone = list(read_all(source, width_and_process))
    shared = list(read_all(source, width_and_process, workers=2, progress=steps.append))
    assert steps == [CHUNK, 5]
    assert [index for index, _ in shared] == list(range(CHUNK + 5))
    torn = [seen for _, seen in shared if isinstance(seen, Broken)]
    assert [broken.name for broken in torn] == ["a/3.png"]
    assert torn == [seen for _, seen in alone if isinstance(seen, Broken)]
    assert os.getpid() not in {seen[1] for _, seen in shared if not isinstance(seen, Broken)}
    assert {seen[0] for _, seen in shared if not isinstance(seen, Broken)} == {16}


def test_a_process_that_dies_is_one_clear_line(tmp_path):
    source = open_folder(write_classes(tmp_path, {"a": 1, "b": 1})).train
    with pytest.raises(FailureError, match=r"died.*fewer workers"):
        list(read_all(source, die, workers=1))
