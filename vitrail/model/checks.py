"""One check for every description of a model: a wrong value is one line that names it."""

import math
from dataclasses import fields
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from vitrail.errors import VitrailError

MAY_BE_ZERO = {"classes", "registers", "hidden", "head_width"}
LARGEST_SIDE = 16_384
# Far above every model there is; a file's header may name any number, and each is built in turn.
LARGEST = {"depth": 1000, "units": 1000, "classes": 10_000_000}
LARGEST_COUNT = 1_000_000
MOST_STAGES = 16
RATES = {"dropout", "embedding_dropout", "drop_path"}


def check_fields(description: Any) -> None:
    """Every field of an architecture holds what its type and its name promise."""
    for name, hint in hints(type(description)).items():
        value = getattr(description, name)
        if value is None and type(None) in get_args(hint):
            continue
        if promise := promised(name, hint, value):
            raise VitrailError(f"{name} = {value!r}: expected {promise}")


@cache
def hints(kind: type) -> dict[str, Any]:
    """The types of a dataclass's fields."""
    types = get_type_hints(kind)
    return {field.name: types[field.name] for field in fields(kind)}


def promised(name: str, hint: Any, value: Any) -> str:
    """What a value should have been; empty where it is that."""
    if get_origin(hint) is Literal:
        return "" if value in get_args(hint) else f"one of {', '.join(map(str, get_args(hint)))}"
    if hint is int:
        least, most = 0 if name in MAY_BE_ZERO else 1, LARGEST.get(name, LARGEST_COUNT)
        fits = is_count(value) and least <= value <= most
        return "" if fits else f"a whole number from {least} to {most}"
    if name in ("size", "patch"):
        sides = (value, value) if name == "patch" and is_count(value) else value
        fits = are_counts(sides, 2) and max(sides) <= LARGEST_SIDE
        return "" if fits else f"pixels, as 224 or (224, 320), up to {LARGEST_SIDE}"
    if name in ("units", "backbone"):
        whole = isinstance(value, tuple) and are_counts(value, len(value))
        few = whole and len(value) <= MOST_STAGES and max(value, default=0) <= LARGEST["units"]
        return "" if few and (value or name == "backbone") else "the units of each stage"
    return promised_number(name, hint, value)


def promised_number(name: str, hint: Any, value: Any) -> str:
    """The same, for fields that are no counts."""
    if hint is bool:
        return "" if isinstance(value, bool) else "True or False"
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        return "a number"
    if name in RATES:
        return "" if 0 <= value <= 1 else "a rate between 0 and 1"
    if name in ("eps", "width"):
        return "" if 0 < value <= LARGEST_COUNT else "a number above zero"
    return ""


def is_count(value: Any) -> bool:
    """A whole number; Python takes True for one."""
    return isinstance(value, int) and not isinstance(value, bool)


def are_counts(values: Any, length: int) -> bool:
    """A tuple of so many whole numbers above zero."""
    whole = isinstance(values, tuple) and len(values) == length
    return whole and all(is_count(value) and value > 0 for value in values)


def as_size(size: Any) -> tuple[int, int]:
    """Rows and columns, from a side in pixels or from both."""
    sides = (size, size) if is_count(size) else tuple(size) if isinstance(size, list) else size
    if promise := promised("size", tuple[int, int], sides):
        raise VitrailError(f"size = {size!r}: expected {promise}")
    return sides
