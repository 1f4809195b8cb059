"""Names of version 0.1 are still read, from the command line and from files."""

import pytest

from vitrail import aliases
from vitrail.config import load_config, to_flat
from vitrail.model import create
from vitrail.model.variants import from_dict, to_dict
from vitrail.training.resolve import resolve_config


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ("train.average=0.9", "train.ema", 0.9),
        ("train.average_ramp=false", "train.ema_ramp", False),
        ("model.positions=factorised", "model.positions", "factorized"),
        ("sweep.train.average=[0.9,0.99]", "sweep.train.ema", (0.9, 0.99)),
    ],
)
def test_old_settings_are_read_under_their_names_of_today(given, name, value):
    assert to_flat(load_config(None, [given]))[name] == value


def test_recipes_may_hold_old_settings(tmp_path):
    recipe = tmp_path / "old.toml"
    recipe.write_text('[model]\npositions = "factorised"\n[train]\naverage = 0.5\n')
    config = load_config(recipe)
    assert (config.model.positions, config.train.ema) == ("factorized", 0.5)
    given = resolve_config(recipe, {"train.average": 0.25}).config
    assert given.train.ema == 0.25


def test_architectures_may_hold_old_values():
    options = {"width": 8, "depth": 1, "heads": 1, "mlp": 8, "positions": "factorized"}
    architecture = create("Ti/4", classes=2, size=8, class_slot=False, **options).architecture
    stored = to_dict(architecture)
    assert from_dict(stored | {"positions": "factorised"}) == architecture


def test_every_alias_leads_to_a_name_that_is_no_alias_itself():
    for table in (aliases.SETTINGS, aliases.VALUES, aliases.KEYS):
        assert not table.keys() & set(table.values())
