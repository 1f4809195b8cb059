import pytest

from vitrail.config import Config, without_effect
from vitrail.errors import VitrailError
from vitrail.settings import explanations, recipe_names
from vitrail.training.resolve import resolve_config

FROZEN = ["model.init=builtin", "train.freeze=true"]


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ([*FROZEN, "augment.mixup=0.2"], "augment.mixup"),
        ([*FROZEN, "augment.flip=true"], "augment.flip"),
        ([*FROZEN, "model.dropout=0.1"], "model.dropout"),
        ([*FROZEN, "optim.layer_decay=0.8"], "optim.layer_decay"),
        ([*FROZEN, "system.compile=true"], "system.compile"),
        (["model.init=builtin", "model.keep_head=true", "model.head_bias=-2"], "model.head_bias"),
        (["train.masked_share=0.15"], "train.masked_share"),
        (["train.objective=masked", "model.head_bias=-10"], "model.head_bias"),
        (["train.ema_ramp=false"], "train.ema_ramp"),
        (["train.evaluations=0", "train.patience=3"], "train.patience"),
        (["train.evaluations=0", "train.keep=best"], "train.keep"),
        (["data.train_on=train+val", "train.keep=best"], "train.keep"),
        (["data.train_on=train+val", "train.evaluations=5"], "train.evaluations"),
        (["data.train_on=train+val", "data.val=0.2"], "data.val"),
        (["augment.crop=pad", "augment.area=0.2"], "augment.area"),
        (["augment.randaugment_magnitude=9"], "augment.randaugment_magnitude"),
        (["augment.mixed=0.5"], "augment.mixed"),
        (["optim.name=adamw", "optim.momentum=0.95"], "optim.momentum"),
        (["optim.beta2=0.95"], "optim.beta2"),
        (["optim.decay=constant", "optim.floor=1e-5"], "optim.floor"),
        (["optim.milestones=[0.5]"], "optim.milestones"),
        (["system.graphs=true"], "system.graphs"),
        (["system.checkpoint_steps=5", "system.checkpoint_minutes=1"], "system.checkpoint_minutes"),
        (["train.steps=5", "train.epochs=2"], "train.steps and train.epochs"),
    ],
)
def test_a_given_setting_without_effect_is_refused(settings, name):
    with pytest.raises(VitrailError, match=rf"^{name} .*leave one of them out$"):
        resolve_config("finetune/folder", ["data.source=digits", *settings])


@pytest.mark.parametrize(
    "settings",
    [
        [*FROZEN, "augment.flip=false", "augment.mixup=0", "augment.crop=none"],
        ["optim.name=adamw"],  # the recipe's momentum stays, unused
        ["optim.name=adamw", "optim.momentum=0"],
        ["train.ema=0"],
        ["train.evaluations=0", "train.keep=last"],
    ],
)
def test_what_is_obeyed_or_comes_from_the_recipe_is_not(settings):
    resolve_config("cifar10/vit", settings)


def test_a_sweep_refuses_what_none_of_its_runs_would_obey():
    momentum = "optim.momentum=[0.9, 0.95]"
    resolve_config("finetune/folder", ['optim.name=["sgd","adamw"]', momentum], lists=True)
    with pytest.raises(VitrailError, match=r"^optim.momentum has no effect with optim.name=adam"):
        resolve_config("finetune/folder", ['optim.name=["adam","adamw"]', momentum], lists=True)


def test_no_recipe_is_refused():
    for name in recipe_names():
        assert resolve_config(name, (), True).recipe == resolve_config(name).recipe


def test_every_rule_names_a_setting():
    names = {name for _, _, names in without_effect(Config()) for name in names}
    assert all(name in explanations() or name == "augment." for name in names)
