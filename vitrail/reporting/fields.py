"""Values of files nobody vouches for: what is missing or of another kind reads as absent."""

import json
import math
import re
from pathlib import Path
from typing import Any

from vitrail.errors import one_line

# What would break a page or a terminal; a tab or a new line in a command is meant.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


class Fields:
    """An object of a JSON file, asked for values by name and kind."""

    def __init__(self, values: Any = None) -> None:
        self.values: dict[str, Any] = values if isinstance(values, dict) else {}

    def __bool__(self) -> bool:
        return bool(self.values)

    def text(self, key: str) -> str:
        """A word or a number as text; empty where there is none."""
        return as_text(self.values.get(key))

    def number(self, key: str) -> float:
        """A number; NaN where there is none."""
        return as_number(self.values.get(key))

    def count(self, key: str) -> int:
        """A whole number of things; zero where there is none."""
        value = self.number(key)
        return int(value) if math.isfinite(value) else 0

    def span(self, key: str) -> tuple[float, float]:
        """Two numbers, such as the ends of an interval; NaN where they are not there."""
        value = self.values.get(key)
        if not isinstance(value, list) or len(value) != 2:
            return math.nan, math.nan
        return as_number(value[0]), as_number(value[1])

    def fields(self, key: str) -> "Fields":
        """An object inside this one."""
        return Fields(self.values.get(key))

    def rows(self, key: str) -> list["Fields"]:
        """A list of objects."""
        return [Fields(row) for row in self.items(key) if isinstance(row, dict)]

    def items(self, key: str) -> list[Any]:
        """A list of anything."""
        value = self.values.get(key)
        return value if isinstance(value, list) else []

    def pairs(self, key: str) -> list[tuple[str, str]]:
        """A list of two words each, such as a file and what is wrong with it."""
        rows = [row for row in self.items(key) if isinstance(row, list) and len(row) == 2]
        return [(as_text(first), as_text(second)) for first, second in rows]


def is_number(value: Any) -> bool:
    """Whether it fits a float; JSON knows whole numbers of any length."""
    return type(value) is float or (type(value) is int and abs(value) < 1 << 63)


def as_number(value: Any) -> float:
    """A finite number, or NaN."""
    number = float(value) if is_number(value) else math.nan
    return number if math.isfinite(number) else math.nan


def as_text(value: Any) -> str:
    """A plain value as it is written in a settings file."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (str, int, float)):
        return CONTROL.sub("\N{REPLACEMENT CHARACTER}", str(value))
    if isinstance(value, list):
        return "[" + ", ".join(as_text(item) for item in value) + "]"
    return ""


def read_object(path: Path) -> tuple[Fields, str]:
    """A JSON file's object, and in words why there is none."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return Fields(), "is missing"
    except OSError as error:
        return Fields(), f"cannot be read: {one_line(error)}"
    except (ValueError, RecursionError):
        return Fields(), "is cut short or is not JSON"
    return Fields(value), "" if isinstance(value, dict) else "holds no JSON object"
