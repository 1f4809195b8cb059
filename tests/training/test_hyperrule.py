"""BiT's HyperRule, as its paper has it."""

import pytest

from vitrail.config import Config, check_value, load_config, with_settings
from vitrail.data.opening import open_data
from vitrail.training.build import apply_hyperrule
from vitrail.training.optim import hyperrule


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
        assert check_value(name, value) == value


def test_the_warm_up_is_that_of_the_released_code():
    small, large = hyperrule(3_000, 300.0), hyperrule(30_000, 300.0)
    assert (small["optim.warmup"], large["optim.warmup"]) == (100, 500)


def test_the_recipe_holds_what_is_the_same_for_all_data():
    config = load_config("finetune/bit_hyperrule")
    optim = config.optim
    assert (optim.name, optim.lr, config.train.batch) == ("sgd", 0.003, 512)
    assert (optim.momentum, optim.weight_decay, optim.clip) == (0.9, 0, 0)
    assert (optim.decay, optim.milestones) == ("staircase", (0.3, 0.6, 0.9))
    assert (config.data.crop, config.augment.crop) == (0.0, "resize")


def test_the_rule_fills_in_what_nobody_has_set():
    digits = open_data("digits")
    config = apply_hyperrule(load_config("finetune/bit_hyperrule"), digits)
    assert (config.train.steps, config.optim.warmup, config.data.size) == (500, 100, 128)
    assert not config.train.hyperrule


def test_a_length_in_epochs_stays():
    config = apply_hyperrule(
        load_config("finetune/bit_hyperrule", ["train.epochs=5"]), open_data("digits")
    )
    assert (config.train.epochs, config.train.steps) == (5, 0)


def test_what_a_user_sets_stays():
    wish = load_config(
        "finetune/bit_hyperrule", ["train.steps=7", "optim.lr=0.06", "data.size=160"]
    )
    config = apply_hyperrule(wish, open_data("digits"))
    assert (config.train.steps, config.optim.lr, config.data.size) == (7, 0.06, 160)
    assert config.optim.warmup == 100


def test_it_adds_up_to_a_run():
    assert with_settings(Config(), hyperrule(1000, 300.0)).train.steps == 500
