"""Recipes ↔ `Config`: one parser and one validator for TOML files and for the command line."""

import ast
import inspect
import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from vitrail import aliases
from vitrail.config import Config, shown
from vitrail.errors import VitrailError, did_you_mean

RECIPES = Path(str(files("vitrail"))) / "recipes"
_LENGTHS = ("train.steps", "train.epochs", "train.minutes")
"""Setting one of them unsets the others."""

_NO_FLIP: dict[str, Any] = {"augment.flip": False}
_NO_CROP: dict[str, Any] = {"augment.crop": "none"}
DATASET_SETTINGS: dict[str, dict[str, Any]] = {
    "vtab/clevr_count": _NO_CROP,
    "vtab/clevr_dist": _NO_CROP,
    "vtab/dmlab": _NO_CROP,
    "vtab/dsprites_loc": _NO_FLIP | _NO_CROP,
    "vtab/dsprites_ori": _NO_FLIP,
    "vtab/kitti_dist": _NO_CROP,
    "vtab/smallnorb_azim": _NO_FLIP,
}
"""Settings that a data set implies: BiT (arXiv 1912.11370, section 3.3) neither mirrors nor crops
VTAB's images where that changes the label."""


def load_config(recipe: str | Path | None = None, settings: Sequence[str] = ()) -> Config:
    """The `Config` of a recipe (a name, a path, or None for the defaults) with settings applied."""
    given = [parse_setting(setting) for setting in settings]
    written = {} if recipe is None else read_recipe(find_recipe(recipe))
    values = with_dataset_settings(written, dict(given))
    for name, value in given:
        override_value(values, name, value)
    return build_config(values)


def override_value(values: dict[str, Any], name: str, value: Any) -> None:
    """Set one value, which also takes it out of a sweep."""
    set_value(values, name, value)
    values.pop(f"sweep.{name}", None)


def with_dataset_settings(recipe: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's settings with those that its data set implies.

    The recipe overrides what its own data set implies, but not what a given data set implies.
    """
    if "data.source" in given:
        return {**recipe, **DATASET_SETTINGS.get(str(given["data.source"]), {})}
    return {**DATASET_SETTINGS.get(recipe.get("data.source", ""), {}), **recipe}


def recipe_names() -> list[str]:
    """Names of the recipes inside the package."""
    paths = (path.relative_to(RECIPES) for path in RECIPES.rglob("*.toml"))
    return sorted(path.with_suffix("").as_posix() for path in paths)


def find_recipe(recipe: str | Path) -> Path:
    """The path of a recipe: a file, or the name of one inside the package."""
    if (path := Path(recipe)).is_file():
        return path
    name = str(recipe).removesuffix(".toml")
    if name in recipe_names():
        return RECIPES / f"{name}.toml"
    hint = did_you_mean(name, recipe_names()) or "; `vitrail config` lists them"
    raise VitrailError(f"no recipe named '{recipe}'{hint}")


def read_recipe(path: Path) -> dict[str, Any]:
    """The settings of a recipe as a flat dictionary, each value checked."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
        pairs = flatten(tree)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise VitrailError(f"cannot read {path}: {error}") from None
    except RecursionError:
        raise VitrailError(f"cannot read {path}: it is nested too deeply") from None
    values: dict[str, Any] = {}
    try:
        for name, value in pairs:
            set_value(values, name, value)
    except VitrailError as error:
        raise VitrailError(f"{path}: {error}") from None
    return values


def flatten(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Dotted names and values, in the order of the file."""
    pairs = []
    for key, value in tree.items():
        if isinstance(value, dict):
            pairs += flatten(value, f"{prefix}{key}.")
        else:
            pairs.append((prefix + key, value))
    return pairs


def parse_setting(setting: str) -> tuple[str, Any]:
    """`section.key=value`; the value is a TOML value, and a bare word is a string."""
    name, equals, text = setting.partition("=")
    name, text = aliases.setting(name.strip()), text.strip()
    if not equals or not name:
        raise VitrailError(f"'{setting}' is not a setting; expected section.key=value")
    if _type_of(name) is str and not text.startswith(('"', "'", "[")):
        return name, text
    try:
        return name, tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return name, text


def set_value(values: dict[str, Any], name: str, value: Any) -> None:
    """Check one setting and add it to `values`."""
    name = aliases.setting(name)
    if name.startswith("sweep."):
        setting = name.removeprefix("sweep.")
        if not isinstance(value, list) or not value:
            raise VitrailError(f"{name} = {shown(value)}: expected a list of values to try")
        values[name] = tuple(check_value(setting, item) for item in value)
        return
    values[name] = check_value(name, value)
    if name in _LENGTHS and values[name]:
        for other in _LENGTHS:
            if other != name:
                values.pop(other, None)


def _type_of(name: str) -> Any:
    known = schema()
    if name.startswith("sweep."):
        return tuple
    if name not in known:
        raise VitrailError(f"unknown setting '{name}'{_suggestion(name, list(known))}")
    return known[name]


def _suggestion(name: str, known: Sequence[str]) -> str:
    """The nearest setting; the same key in another section counts as near."""
    last = name.rpartition(".")[2]
    same = [other for other in known if other.rpartition(".")[2] == last]
    return f"; did you mean '{same[0]}'?" if len(same) == 1 else did_you_mean(name, known)


@cache
def schema() -> dict[str, Any]:
    """The dotted name and the type of every setting, in the order of `Config`."""
    types = get_type_hints(Config)
    settings: dict[str, Any] = {}
    for name, kind in types.items():
        if is_dataclass(kind):
            inner = get_type_hints(kind)
            settings |= {f"{name}.{field.name}": inner[field.name] for field in fields(kind)}
        elif name != "sweep":
            settings[name] = kind
    return settings


def check_value(name: str, value: Any) -> Any:
    """The value converted to the setting's type; an error says what was expected."""
    kind = _type_of(name)
    fitted = _fit(kind, value)
    if fitted is None:
        hint = "; a list is for `vitrail sweep`" if isinstance(value, list) else ""
        raise VitrailError(f"{name} = {shown(value)}: expected {_expected(kind)}{hint}")
    return fitted


def _fit(kind: Any, value: Any) -> Any:
    """The value as that type, or None; a whole number may stand for a float, and 1e3 for 1000."""
    if isinstance(kind, UnionType):
        return next(
            (fitted for k in get_args(kind) if (fitted := _fit(k, value)) is not None), None
        )
    if get_origin(kind) is Literal:
        value = aliases.VALUES.get(value, value) if isinstance(value, str) else None
        return value if value in get_args(kind) else None
    if get_origin(kind) is tuple:
        return _fit_tuple(get_args(kind), value)
    if kind in (bool, str):
        return value if isinstance(value, kind) else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if kind is float:
        return float(value)
    return int(value) if value == value // 1 else None


def _fit_tuple(kinds: tuple[Any, ...], value: Any) -> Any:
    """A list as a tuple of the right length and types, or None."""
    if not isinstance(value, (list, tuple)):
        return None
    if kinds[-1] is not ... and len(value) != len(kinds):
        return None
    items = tuple(_fit(kinds[0], item) for item in value)
    return None if None in items else items


def _expected(kind: Any) -> str:
    if isinstance(kind, UnionType):
        return " or ".join(_expected(k) for k in get_args(kind))
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(word or '""' for word in get_args(kind))
    if get_origin(kind) is tuple:
        return "[rows, columns]" if get_args(kind)[-1] is int else "a list of numbers"
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    return names[kind]


def build_config(values: Mapping[str, Any]) -> Config:
    """The `Config` of checked settings with dotted names."""
    sections: dict[str, Any] = {"sweep": {}}
    for name, value in values.items():
        section, dot, key = name.partition(".")
        if not dot:
            sections[section] = value
        else:
            sections.setdefault(section, {})[key] = value
    types = get_type_hints(Config)
    built = {
        name: types[name](**value) if is_dataclass(types[name]) else value
        for name, value in sections.items()
    }
    return Config(**built)


def with_settings(config: Config, **changes: Any) -> Config:
    """A copy with other values; dots in names are written `__`: `optim__lr=0.1`."""
    values = to_flat(config)
    for name, value in changes.items():
        set_value(
            values, name.replace("__", "."), list(value) if isinstance(value, tuple) else value
        )
    return build_config(values)


def to_flat(config: Config) -> dict[str, Any]:
    """The dotted name and the value of every setting, with those of the sweep."""
    values: dict[str, Any] = {}
    for name in schema():
        section, dot, key = name.partition(".")
        values[name] = getattr(getattr(config, section), key) if dot else getattr(config, section)
    return values | {f"sweep.{name}": tried for name, tried in config.sweep.items()}


def changed_settings(config: Config, base: Config | None = None) -> list[str]:
    """The settings that differ from the defaults, or from `base`, as `section.key=value`."""
    before = to_flat(base or Config())
    return [
        f"{name}={value if _is_bare(value) else shown(value)}"
        for name, value in to_flat(config).items()
        if before.get(name) != value
    ]


def _is_bare(value: Any) -> bool:
    """Whether a value is text that needs no quotes on a command line."""
    if not isinstance(value, str) or not value.isprintable():
        return False
    return value == value.strip() and not value.startswith(('"', "'", "["))


def to_toml(config: Config) -> str:
    """A recipe of every setting, each with its explanation as a comment."""
    lines: list[str] = []
    section = ""
    for name, value in to_flat(config).items():
        here, dot, key = name.partition(".")
        if dot and here != section:
            lines += ["", f"[{here}]"]
            section = here
        explained = " ".join(filter(None, (_choices(name), explanations().get(name, ""))))
        comment = f"  # {explained}" if explained else ""
        # Names under [sweep] are dotted settings, and would make tables of their own.
        shown_key = f'"{key}"' if here == "sweep" else key if dot else here
        lines.append(f"{shown_key} = {shown(value)}{comment}")
    return "\n".join(lines) + "\n"


def _choices(name: str) -> str:
    kind = schema().get(name)
    return f"{' | '.join(map(shown, get_args(kind)))}." if get_origin(kind) is Literal else ""


@cache
def explanations() -> dict[str, str]:
    """The docstring below each setting, in one line."""
    texts = _docstrings(Config)
    for name, kind in get_type_hints(Config).items():
        if is_dataclass(kind) and isinstance(kind, type):
            texts |= {f"{name}.{key}": text for key, text in _docstrings(kind).items()}
    return texts


def _docstrings(kind: type) -> dict[str, str]:
    """Attribute → the string literal that follows it, which Python itself does not keep."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    texts = {}
    for line, after in zip(body.body, body.body[1:], strict=False):
        match line, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=text)):
                texts[name] = " ".join(str(text).split())
    return texts
