"""One parser and one validator for recipes and the command line."""

import dataclasses
import re
import tomllib
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.config import (
    _ABOVE_ZERO,
    _LENGTHS,
    _MAY_BE_NEGATIVE,
    _RATES,
    Config,
    Data,
    Model,
    Optim,
    Train,
    build_config,
    changed_settings,
    explanations,
    find_recipe,
    load_config,
    read_recipe,
    recipe_names,
    schema,
    to_flat,
    to_toml,
    toml_value,
    with_settings,
    without_effect,
)
from vitrail.errors import VitrailError
from vitrail.training.resolve import resolve_config


def refused(*given: str) -> str:
    """The one line that such settings get."""
    with pytest.raises(VitrailError) as error:
        load_config(None, given)
    message = str(error.value)
    assert "\n" not in message
    assert error.value.exit_code == 2
    return message


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("optim.lrr=3e-4", "unknown setting 'optim.lrr'; did you mean 'optim.lr'?"),
        ("lr=3e-4", "unknown setting 'lr'; did you mean 'optim.lr'?"),
        ("train.lr=3e-4", "unknown setting 'train.lr'; did you mean 'optim.lr'?"),
        ("modle.variant=B/16", "unknown setting 'modle.variant'; did you mean 'model.variant'?"),
        ("zzz=1", "unknown setting 'zzz'"),
        ("optim.lr", "'optim.lr' is not a setting; expected section.key=value"),
        ("=3", "'=3' is not a setting; expected section.key=value"),
        ("optim.lr=fast", 'optim.lr = "fast": expected a number'),
        ("optim.lr=[0.1, 0.2]", "optim.lr = [0.1, 0.2]: expected a number; a list is for"),
        ("train.steps=1.5", "train.steps = 1.5: expected a whole number"),
        ("train.steps=true", "train.steps = true: expected a whole number"),
        ("augment.flip=1", "augment.flip = 1: expected true or false"),
        ("augment.flip=yes", 'augment.flip = "yes": expected true or false'),
        ("optim.decay=cosin", 'optim.decay = "cosin": expected one of cosine, linear, stair'),
        ("model.pool=cls", 'model.pool = "cls": expected one of "", class, mean, attention'),
        ("data.size=[1, 2, 3]", "data.size = [1, 2, 3]: expected a whole number or [rows, col"),
        ("optim.milestones=0.5", "optim.milestones = 0.5: expected a list of numbers"),
        ("sweep.optim.lr=0.1", "sweep.optim.lr = 0.1: expected a list of values to try"),
        ("sweep.optim.lr=[]", "sweep.optim.lr = []: expected a list of values to try"),
        ('sweep.optim.lr=["a"]', 'optim.lr = "a": expected a number'),
        ("sweep.optim.lrr=[1]", "unknown setting 'optim.lrr'; did you mean 'optim.lr'?"),
    ],
)
def test_a_wrong_setting_is_one_line_that_says_what_was_expected(setting, expected):
    assert refused(setting).startswith(expected)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["optim.lr=0"], "optim.lr = 0.0: expected a number above zero"),
        (["train.batch=-1"], "train.batch = -1: expected a number above zero"),
        (["data.size=[224, 0]"], "data.size = [224, 0]: expected a number above zero"),
        (["model.dropout=1.5"], "model.dropout = 1.5: expected a number from 0 to 1"),
        (["optim.warmup=-1"], "optim.warmup = -1: expected zero or more"),
        (["optim.lr=inf"], "optim.lr = inf: expected a finite number"),
        (["optim.weight_decay=nan"], "optim.weight_decay = nan: expected a finite number"),
        (["seed=-1"], "seed = -1: expected zero or more"),
        (["data.val=0.5", "data.test=0.5"], "data.val + data.test = 1 leaves nothing to train on"),
        (["model.init=x", "model.hidden=true"], "model.hidden cannot be changed in trained weig"),
        (
            ["train.objective=masked", "augment.mixup=0.1"],
            "train.objective=masked uses no labels; remove augment.mixup",
        ),
        (["train.freeze=true"], "train.freeze requires pre-trained weights; set model.init"),
        (["data.crop=1.5"], "data.crop = 1.5: expected a fraction in (0, 1], or 0, or -1"),
        (["data.crop=-0.5"], "data.crop = -0.5: expected a fraction in (0, 1], or 0, or -1"),
        (["train.label_smoothing=1"], "train.label_smoothing = 1 leaves no label to learn"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(given, expected):
    assert refused(*given).startswith(expected)


def test_the_same_holds_in_python():
    with pytest.raises(VitrailError, match=r"optim.lr = 0.0: expected a number above zero"):
        Config(optim=Optim(lr=0.0))
    with pytest.raises(VitrailError, match=r"train.steps and train.epochs cannot both be set"):
        Config(train=Train(steps=3, epochs=3.0))


@pytest.mark.parametrize(
    ("setting", "name", "value"),
    [
        ("optim.lr=3e-4", "optim.lr", 3e-4),
        ("optim.lr=1", "optim.lr", 1.0),
        ("train.steps=1e4", "train.steps", 10_000),
        ("model.variant=B/16", "model.variant", "B/16"),
        ('model.variant="B/16"', "model.variant", "B/16"),
        ("data.source=007", "data.source", "007"),
        ("data.source=a=b", "data.source", "a=b"),
        (" optim.name = lamb ", "optim.name", "lamb"),
        ("data.size=384", "data.size", 384),
        ("data.size=[224, 320]", "data.size", (224, 320)),
        ("optim.milestones=[0.5]", "optim.milestones", (0.5,)),
        ("augment.flip=false", "augment.flip", False),
        ("seed=7", "seed", 7),
    ],
)
def test_a_value_is_a_toml_value_and_a_bare_word_is_text(setting, name, value):
    found = to_flat(load_config(None, [setting]))[name]
    assert found == value
    assert type(found) is type(value)


def test_the_last_setting_wins_over_the_recipe(tmp_path):
    recipe = tmp_path / "mine.toml"
    recipe.write_text("[optim]\nlr = 1.0\nname = 'adamw'\n")
    config = load_config(recipe, ["optim.lr=2", "optim.lr=3"])
    assert (config.optim.lr, config.optim.name) == (3.0, "adamw")


@pytest.mark.parametrize("length", _LENGTHS)
def test_setting_one_length_unsets_the_others(length, tmp_path):
    recipe = tmp_path / "mine.toml"
    for other in _LENGTHS:
        section, key = other.split(".")
        recipe.write_text(f"[{section}]\n{key} = 30\n")
        found = to_flat(load_config(recipe, [f"{length}=7"]))
        assert {name: found[name] for name in _LENGTHS if found[name]} == {length: 7}
    assert (
        sum(to_flat(load_config(None, [f"{name}=5" for name in _LENGTHS]))[n] > 0 for n in _LENGTHS)
        == 1
    )


def test_a_length_of_zero_leaves_the_others_alone():
    config = load_config(None, ["train.epochs=3", "train.steps=0"])
    assert (config.train.epochs, config.train.steps) == (3.0, 0)


def test_a_sweep_is_a_list_for_each_setting():
    config = load_config(None, ["sweep.optim.lr=[1, 0.1]", 'sweep.model.init=["a", "b"]'])
    assert config.sweep == {"optim.lr": (1.0, 0.1), "model.init": ("a", "b")}


def test_a_broken_recipe_is_named(tmp_path):
    path = tmp_path / "mine.toml"
    for text in ("[optim", "[optim]\nlrr = 3\n", "[optim]\nlr = 'fast'\n", "[optim]\nlr = -1\n"):
        path.write_text(text)
        with pytest.raises(VitrailError) as error:
            load_config(path)
        assert str(path) in str(error.value) or "optim.lr = -1" in str(error.value)
        assert "\n" not in str(error.value)


def test_an_unknown_recipe_is_suggested():
    with pytest.raises(VitrailError, match=r"no recipe named 'finetune/foldr'; did you mean"):
        find_recipe("finetune/foldr")
    assert (
        find_recipe("finetune/folder").name
        == find_recipe("finetune/folder.toml").name
        == "folder.toml"
    )


def test_every_setting_is_explained_in_a_sentence():
    for name in schema():
        assert re.fullmatch(r"[A-Za-z].{10,}\.", explanations()[name]), name


def test_the_explanation_follows_every_setting_in_the_text():
    text = to_toml(Config())
    for name in schema():
        key = name.rpartition(".")[2]
        assert any(
            line.startswith(f"{key} = ") and line.endswith(explanations()[name])
            for line in text.splitlines()
        ), name


def test_the_values_of_a_closed_set_stand_beside_their_setting(tmp_path):
    text = to_toml(Config())
    lines = {line.partition(" = ")[0]: line for line in text.splitlines()}
    assert '# "" | "class" | "mean" | "attention". ' in lines["pool"]
    assert '# "none" | "tensorboard" | ' in lines["tracker"]
    assert "|" not in lines["steps"]
    for name, kind in schema().items():
        if get_origin(kind) is Literal:
            allowed = " | ".join(f'"{value}"' for value in get_args(kind))
            assert f"# {allowed}. {explanations()[name]}" in text, name
    (tmp_path / "all.toml").write_text(text)
    assert load_config(tmp_path / "all.toml") == Config()


def test_changed_settings_are_those_that_differ():
    config = load_config(None, ["optim.lr=3e-4", "model.variant=B/16", "data.size=[1, 2]"])
    assert changed_settings(config) == ["model.variant=B/16", "data.size=[1, 2]", "optim.lr=0.0003"]
    assert changed_settings(config, config) == []
    assert load_config(None, changed_settings(config)) == config


def test_other_values_for_the_same_run():
    config = with_settings(Config(), {"optim.lr": 0.5, "data.size": (3, 4), "seed": 3})
    assert (config.optim.lr, config.data.size, config.seed) == (0.5, (3, 4), 3)
    with pytest.raises(VitrailError, match="unknown setting"):
        with_settings(Config(), {"optim.lrr": 1})


def test_a_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().seed = 3  # type: ignore[misc]


def numbers(name: str, kind: Any) -> st.SearchStrategy[Any]:
    """Valid numbers for a setting."""
    if kind is int:
        return st.integers(1, 2**40)
    if name in _RATES:
        return st.floats(0.01 if name in _ABOVE_ZERO else 0, 0.45)
    low = -1e6 if name in _MAY_BE_NEGATIVE and name != "data.crop" else 1e-9
    return st.just(1.0) if name == "data.crop" else st.floats(low, 1e6)


def values(name: str, kind: Any) -> st.SearchStrategy[Any]:
    """Valid values for a setting."""
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    if kind is bool:
        return st.booleans()
    if kind is str:
        return st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
    if get_origin(kind) is tuple:
        return st.lists(st.floats(0, 1), max_size=4).map(tuple)
    if bool in get_args(kind):
        return st.one_of([values(name, part) for part in get_args(kind)])
    if get_args(kind):  # a side, or rows and columns
        sides = st.integers(1, 2000)
        return sides | st.tuples(sides, sides)
    return numbers(name, kind)


@st.composite
def runs(draw: Any) -> dict[str, Any]:
    """The settings of any valid run."""
    chosen = draw(st.sets(st.sampled_from(sorted(schema())), max_size=12))
    if "model.init" in chosen:
        chosen = {n for n in chosen if not n.startswith("model.") or n == "model.init"}
    chosen -= {"train.freeze", "model.keep_head"} | set(sorted(chosen & set(_LENGTHS))[1:])
    found = {name: draw(values(name, schema()[name])) for name in sorted(chosen)}
    if found.get("train.objective") == "masked":
        found["train.objective"] = "sigmoid"  # masked goes with few other settings
    if found.get("optim.name") == "muon":
        found.pop("system.parallel", None)  # it needs whole matrices
    swept = draw(st.sets(st.sampled_from(sorted(schema())), max_size=2))
    for name in sorted(swept):
        tried = st.lists(values(name, schema()[name]), min_size=1, max_size=3)
        found[f"sweep.{name}"] = tuple(draw(tried))
    return found


@given(runs())
@settings(max_examples=150, deadline=None)
def test_any_run_comes_back_from_its_text(tmp_path_factory, found):
    config = build_config(found)
    path = tmp_path_factory.mktemp("run") / "config.toml"
    path.write_text(to_toml(config), encoding="utf-8")
    assert load_config(path) == config
    assert build_config(read_recipe(path)) == config
    assert load_config(None, changed_settings(config)) == config


@given(st.text(st.characters(exclude_categories=("Cs",))))
@settings(max_examples=100, deadline=None)
def test_any_text_survives_being_shown(text):
    assert tomllib.loads(f"x = {toml_value(text)}")["x"] == text


def test_sections_can_be_made_by_hand():
    config = Config(model=Model(variant="B/16"), data=Data(source="digits"))
    assert load_config(None, ["model.variant=B/16", "data.source=digits"]) == config


@pytest.mark.parametrize(
    "text", ["seed = " + "[" * 100_000, "[" + ".".join("a" * 3000) + "]", "a = " + "{a=" * 5000]
)
def test_a_recipe_nested_too_deeply_is_one_line(tmp_path, text):
    (tmp_path / "deep.toml").write_text(text)
    with pytest.raises(VitrailError, match=r"deep\.toml"):
        load_config(tmp_path / "deep.toml")
    with pytest.raises(VitrailError, match=r"optim\.lr"):
        load_config(None, ["optim.lr=" + "[" * 100_000])


# Settings without effect

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
        (["train.fewshot_data=digits"], "train.fewshot_data"),
        (["train.evaluations=0", "train.fewshot=5"], "train.fewshot"),
        (["data.train_on=train+val", "train.keep_all=true"], "train.keep_all"),
        ([*FROZEN, "train.fewshot=5"], "train.fewshot"),
        (["optim.name=adamw", "optim.momentum=0.95"], "optim.momentum"),
        (["optim.beta2=0.95"], "optim.beta2"),
        (["optim.decay=constant", "optim.floor=1e-5"], "optim.floor"),
        (["optim.milestones=[0.5]"], "optim.milestones"),
        (["system.augment=cpu", "system.cache=disk"], "system.cache"),
        (["system.checkpoint_steps=5", "system.checkpoint_minutes=1"], "system.checkpoint_minutes"),
        (["train.steps=5", "train.epochs=2"], "train.steps and train.epochs"),
    ],
)
def test_a_given_setting_without_effect_is_refused(settings, name):
    with pytest.raises(VitrailError, match=rf"^{name} .*remove one of them$"):
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
