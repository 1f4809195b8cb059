"""BiT's HyperRule, as its paper has it."""

import pytest

from vitrail.config import Config
from vitrail.settings import checked, with_settings
from vitrail.training.hyperrule import hyperrule


@pytest.mark.parametrize(
    ("images", "steps", "mixup"),
    [
        (1, 500, 0.0),
        (19_999, 500, 0.0),
        (20_000, 10_000, 0.1),
        (499_999, 10_000, 0.1),
        (500_000, 20_000, 0.1),
        (300_000_000, 20_000, 0.1),
    ],
)
def test_length_and_mixup_follow_from_the_number_of_images(images, steps, mixup):
    rule = hyperrule(images, 300.0)
    assert (rule["train.steps"], rule["augment.mixup"]) == (steps, mixup)


@pytest.mark.parametrize(("side", "size"), [(32.0, 128), (95.9, 128), (96.0, 384), (500.0, 384)])
def test_small_pictures_are_shown_at_128_pixels_others_at_384(side, size):
    assert hyperrule(1000, side)["data.size"] == size


def test_every_setting_exists_and_has_the_right_type():
    for name, value in hyperrule(1000, 300.0).items():
        assert checked(name, list(value) if isinstance(value, tuple) else value) == value


def test_warm_up_and_decays_are_those_of_the_released_code_and_the_paper():
    small, large = hyperrule(3_000, 300.0), hyperrule(30_000, 300.0)
    assert (small["optim.warmup"], large["optim.warmup"]) == (100, 500)
    assert small["optim.milestones"] == large["optim.milestones"] == (0.3, 0.6, 0.9)


def test_sgd_without_decay_or_clipping():
    rule = hyperrule(1000, 300.0)
    assert (rule["optim.name"], rule["optim.lr"], rule["train.batch"]) == ("sgd", 0.003, 512)
    assert (rule["optim.momentum"], rule["optim.weight_decay"], rule["optim.clip"]) == (0.9, 0, 0)


def test_it_adds_up_to_a_run():
    rule = {name.replace(".", "__"): value for name, value in hyperrule(1000, 300.0).items()}
    assert with_settings(Config(), **rule).train.steps == 500
