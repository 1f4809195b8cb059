"""Recipes ↔ `Config`: one parser and one validator for files and for the command line."""

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
LENGTHS = ("train.steps", "train.epochs", "train.minutes")
"""One choice: setting one of them unsets the others."""

NO_FLIP: dict[str, Any] = {"augment.flip": False}
NO_CROP: dict[str, Any] = {"augment.crop": "none"}
OWN: dict[str, dict[str, Any]] = {
    "vtab/clevr_count": NO_CROP,
    "vtab/clevr_dist": NO_CROP,
    "vtab/dmlab": NO_CROP,
    "vtab/dsprites_loc": NO_FLIP | NO_CROP,
    "vtab/dsprites_ori": NO_FLIP,
    "vtab/kitti_dist": NO_CROP,
    "vtab/smallnorb_azim": NO_FLIP,
}
"""What data sets for itself by being named: BiT (arXiv 1912.11370, section 3.3) neither mirrors
nor crops VTAB's images where that changes the label."""


def load(recipe: str | Path | None = None, settings: Sequence[str] = ()) -> Config:
    """The `Config` of a recipe (a name, a path, or none for the defaults) and further settings."""
    given = [parse(setting) for setting in settings]
    values = beneath({} if recipe is None else read(find(recipe)), dict(given))
    for name, value in given:
        override(values, name, value)
    return build(values)


def override(values: dict[str, Any], name: str, value: Any) -> None:
    """Sets one value, which leaves nothing to try."""
    put(values, name, value)
    values.pop(f"sweep.{name}", None)


def beneath(recipe: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that given ones are put upon: a recipe's, and those of the data that is named.

    Whoever names the data may set these too, and is heeded.
    """
    if "data.source" in given:
        return {**recipe, **OWN.get(str(given["data.source"]), {})}
    return {**OWN.get(recipe.get("data.source", ""), {}), **recipe}


def recipes() -> list[str]:
    """Names of the recipes inside the package."""
    found = (path.relative_to(RECIPES) for path in RECIPES.rglob("*.toml"))
    return sorted(path.with_suffix("").as_posix() for path in found)


def find(recipe: str | Path) -> Path:
    """Where a recipe lies: a path as it is, a name inside the package."""
    if (path := Path(recipe)).is_file():
        return path
    name = str(recipe).removesuffix(".toml")
    if name in recipes():
        return RECIPES / f"{name}.toml"
    hint = did_you_mean(name, recipes()) or "; `vitrail config` lists them"
    raise VitrailError(f"no recipe named '{recipe}'{hint}")


def read(path: Path) -> dict[str, Any]:
    """The settings of a recipe as a flat dictionary, each value checked."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
        pairs = flat(tree)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise VitrailError(f"cannot read {path}: {error}") from None
    except RecursionError:
        raise VitrailError(f"cannot read {path}: it is nested too deeply") from None
    values: dict[str, Any] = {}
    try:
        for name, value in pairs:
            put(values, name, value)
    except VitrailError as error:
        raise VitrailError(f"{path}: {error}") from None
    return values


def flat(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Dotted names and values, in the order of the file."""
    found = []
    for key, value in tree.items():
        if isinstance(value, dict):
            found += flat(value, f"{prefix}{key}.")
        else:
            found.append((prefix + key, value))
    return found


def parse(setting: str) -> tuple[str, Any]:
    """`section.key=value`; the value is a TOML value, and a bare word is a string."""
    name, equals, text = setting.partition("=")
    name, text = aliases.setting(name.strip()), text.strip()
    if not equals or not name:
        raise VitrailError(f"'{setting}' is no setting; expected section.key=value")
    if kind_of(name) is str and not text.startswith(('"', "'", "[")):
        return name, text
    try:
        return name, tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return name, text


def put(values: dict[str, Any], name: str, value: Any) -> None:
    """Adds one checked setting."""
    name = aliases.setting(name)
    if name.startswith("sweep."):
        setting = name.removeprefix("sweep.")
        if not isinstance(value, list) or not value:
            raise VitrailError(f"{name} = {shown(value)}: expected a list of values to try")
        values[name] = tuple(checked(setting, item) for item in value)
        return
    values[name] = checked(name, value)
    if name in LENGTHS and values[name]:
        for other in LENGTHS:
            if other != name:
                values.pop(other, None)


def kind_of(name: str) -> Any:
    """The type of a setting; an unknown name is an error that suggests one."""
    known = schema()
    if name.startswith("sweep."):
        return tuple
    if name not in known:
        raise VitrailError(f"unknown setting '{name}'{suggestion(name, list(known))}")
    return known[name]


def suggestion(name: str, known: Sequence[str]) -> str:
    """The nearest setting: one of the same last word in another section counts as near."""
    last = name.rpartition(".")[2]
    same = [other for other in known if other.rpartition(".")[2] == last]
    return f"; did you mean '{same[0]}'?" if len(same) == 1 else did_you_mean(name, known)


@cache
def schema() -> dict[str, Any]:
    """Every setting's dotted name and its type, in the order they are explained."""
    types = get_type_hints(Config)
    found: dict[str, Any] = {}
    for name, kind in types.items():
        if is_dataclass(kind):
            inner = get_type_hints(kind)
            found |= {f"{name}.{field.name}": inner[field.name] for field in fields(kind)}
        elif name != "sweep":
            found[name] = kind
    return found


def checked(name: str, value: Any) -> Any:
    """The value in the setting's type, or one line that says what was expected."""
    kind = kind_of(name)
    fitted = fit(kind, value)
    if fitted is None:
        hint = "; a list is for `vitrail sweep`" if isinstance(value, list) else ""
        raise VitrailError(f"{name} = {shown(value)}: expected {expected(kind)}{hint}")
    return fitted


def fit(kind: Any, value: Any) -> Any:
    """The value as that type, or None; a whole number may stand for a float, and 1e3 for 1000."""
    if isinstance(kind, UnionType):
        return next((fitted for k in get_args(kind) if (fitted := fit(k, value)) is not None), None)
    if get_origin(kind) is Literal:
        value = aliases.VALUES.get(value, value) if isinstance(value, str) else None
        return value if value in get_args(kind) else None
    if get_origin(kind) is tuple:
        return fit_tuple(get_args(kind), value)
    if kind in (bool, str):
        return value if isinstance(value, kind) else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if kind is float:
        return float(value)
    return int(value) if value == value // 1 else None


def fit_tuple(kinds: tuple[Any, ...], value: Any) -> Any:
    """A list as a tuple of the right length and types, or None."""
    if not isinstance(value, (list, tuple)):
        return None
    if kinds[-1] is not ... and len(value) != len(kinds):
        return None
    items = tuple(fit(kinds[0], item) for item in value)
    return None if None in items else items


def expected(kind: Any) -> str:
    """A type in a person's words."""
    if isinstance(kind, UnionType):
        return " or ".join(expected(k) for k in get_args(kind))
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(word or '""' for word in get_args(kind))
    if get_origin(kind) is tuple:
        return "[rows, columns]" if get_args(kind)[-1] is int else "a list of numbers"
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    return names[kind]


def build(values: Mapping[str, Any]) -> Config:
    """The `Config` of flat, checked settings."""
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
    """The same run with other values; dots of names are written `__`: `optim__lr=0.1`."""
    values = to_flat(config)
    for name, value in changes.items():
        put(values, name.replace("__", "."), list(value) if isinstance(value, tuple) else value)
    return build(values)


def to_flat(config: Config) -> dict[str, Any]:
    """Every setting's dotted name and value, the sweep's included."""
    found: dict[str, Any] = {}
    for name in schema():
        section, dot, key = name.partition(".")
        found[name] = getattr(getattr(config, section), key) if dot else getattr(config, section)
    return found | {f"sweep.{name}": values for name, values in config.sweep.items()}


def changed(config: Config, base: Config | None = None) -> list[str]:
    """The settings that differ from the defaults, or from another run, as `section.key=value`."""
    before = to_flat(base or Config())
    return [
        f"{name}={value if is_bare(value) else shown(value)}"
        for name, value in to_flat(config).items()
        if before.get(name) != value
    ]


def is_bare(value: Any) -> bool:
    """Whether a text can stand on a command line without quotes."""
    if not isinstance(value, str) or not value.isprintable():
        return False
    return value == value.strip() and not value.startswith(('"', "'", "["))


def to_toml(config: Config) -> str:
    """Every setting with its explanation, as a recipe."""
    lines: list[str] = []
    section = ""
    for name, value in to_flat(config).items():
        here, dot, key = name.partition(".")
        if dot and here != section:
            lines += ["", f"[{here}]"]
            section = here
        explained = " ".join(filter(None, (choices(name), explanations().get(name, ""))))
        comment = f"  # {explained}" if explained else ""
        # Names under [sweep] are dotted settings, and would make tables of their own.
        shown_key = f'"{key}"' if here == "sweep" else key if dot else here
        lines.append(f"{shown_key} = {shown(value)}{comment}")
    return "\n".join(lines) + "\n"


def choices(name: str) -> str:
    """The values that a setting may have, where they are a closed set."""
    kind = schema().get(name)
    return f"{' | '.join(map(shown, get_args(kind)))}." if get_origin(kind) is Literal else ""


@cache
def explanations() -> dict[str, str]:
    """The docstring below each setting, in one line."""
    found = docstrings(Config)
    for name, kind in get_type_hints(Config).items():
        if is_dataclass(kind) and isinstance(kind, type):
            found |= {f"{name}.{key}": text for key, text in docstrings(kind).items()}
    return found


def docstrings(kind: type) -> dict[str, str]:
    """Attribute → the string literal that follows it, which Python itself does not keep."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for line, after in zip(body.body, body.body[1:], strict=False):
        match line, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=text)):
                found[name] = " ".join(str(text).split())
    return found
