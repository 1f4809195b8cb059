from itertools import islice

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.data.pictures import write_classes
from vitrail.config import load_config
from vitrail.data.opening import open_run_data
from vitrail.data.preprocessing import Preprocessing
from vitrail.devices import Devices
from vitrail.model import create
from vitrail.training.inputs import ImageInputs
from vitrail.training.objectives.classification import Classification


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_softmax_is_torchs_cross_entropy(smoothing):
    logits, targets = torch.randn(7, 5, dtype=torch.float32), torch.randint(5, (7,))
    losses = Classification(nn.Identity(), 5, "softmax", smoothing)(logits, targets)
    expected = F.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)
    torch.testing.assert_close(losses, expected)


def test_sigmoid_is_summed_over_the_classes():
    logits, targets = torch.randn(7, 5), torch.randint(5, (7,))
    losses = Classification(nn.Identity(), 5, "sigmoid")(logits, targets)
    wanted = F.one_hot(targets, 5)
    expected = -(wanted * logits.sigmoid().log() + (1 - wanted) * (-logits).sigmoid().log()).sum(1)
    torch.testing.assert_close(losses, expected)


def test_soft_targets_are_taken_as_they_are():
    logits = torch.randn(3, 4)
    targets = torch.tensor([[1.0, 0, 0, 0], [0.5, 0.5, 0, 0], [0.1, 0.2, 0.3, 0.4]])
    losses = Classification(nn.Identity(), 4)(logits, targets)
    torch.testing.assert_close(losses, F.cross_entropy(logits, targets, reduction="none"))


def test_class_weights_scale_each_images_loss():
    logits, targets = torch.randn(6, 3), torch.tensor([0, 1, 2, 0, 1, 2])
    weights = torch.tensor([0.5, 1.0, 3.0])
    plain = Classification(nn.Identity(), 3)(logits, targets)
    weighed = Classification(nn.Identity(), 3, class_weights=weights)(logits, targets)
    torch.testing.assert_close(weighed, plain * weights[targets])


def test_the_losses_of_parts_are_those_of_the_whole():
    logits, targets = torch.randn(8, 3), torch.randint(3, (8,))
    task = Classification(nn.Identity(), 3, label_smoothing=0.1, class_weights=torch.rand(3))
    parts = torch.cat([task(logits[:5], targets[:5]), task(logits[5:], targets[5:])])
    torch.testing.assert_close(parts, task(logits, targets))


@pytest.mark.parametrize("where", ["cpu", "device"])
def test_parts_of_a_batch_are_mixed_as_the_whole_in_every_process_and_session(tmp_path, where):
    folder = write_classes(tmp_path / "photos", {"a": 12, "b": 12})
    given = (f"data.source={folder}", "data.val=0", "data.test=0", "data.size=16", "train.batch=8")
    mixing = ("augment.mixup=0.4", "augment.cutmix=1", "augment.mixed=0.9", "system.cache=none")
    config = load_config("digits/vit", [*given, *mixing, f"system.augment={where}"])
    data = open_run_data(config)
    model = create("Ti/4", classes=2, size=16, width=24, depth=1, heads=2, mlp=48)
    model.preprocess = Preprocessing(size=(16, 16))

    def prepared(rank: int, world: int, start: int, size: int) -> list[tuple[Tensor, Tensor]]:
        """What one process makes of four steps, this many images at a time."""
        devices = Devices(torch.device("cpu"), torch.float32, rank, world)
        objective = Classification(model, 2, inputs=ImageInputs(model, data, config, devices))
        steps = []
        for batch in islice(objective.batches(start), 4):
            torch.rand(3)  # whatever else is drawn
            rows = [slice(i, min(i + size, len(batch))) for i in range(0, len(batch), size)]
            parts = [objective.prepare(batch, part) for part in rows]
            steps.append(tuple(map(torch.cat, zip(*parts, strict=True))))
        return steps

    whole = prepared(0, 1, 0, 8)
    assert len(torch.cat([truth for _, truth in whole]).unique()) > 4
    resumed = [*prepared(0, 1, 0, 3)[:2], *prepared(0, 1, 2, 8)[:2]]
    for world in (2, 4):
        ranks = [prepared(rank, world, 0, 1) for rank in range(world)]
        together = [
            tuple(map(torch.cat, zip(*parts, strict=True))) for parts in zip(*ranks, strict=True)
        ]
        for found in (resumed, together):
            for one, other in zip(whole, found, strict=True):
                assert all(map(torch.equal, one, other))
