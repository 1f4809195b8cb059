"""Atomic writes: a file is replaced whole or not at all."""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from vitrail.errors import FailureError, one_line


def replace_with(
    path: Path, save: Callable[[Path], object], *, previous: Path | None = None
) -> None:
    """Run `save` on a temporary file beside `path`, then move that into place.

    The old file, if any, is moved to `previous` where that is given.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.touch()
        mode = part.stat().st_mode  # what the umask allows; safetensors makes files private
        save(part)
        part.chmod(mode)
        with part.open("rb") as file:
            os.fsync(file.fileno())  # or a power cut could leave the name without the bytes
        if previous is not None and path.exists():
            path.replace(previous)
        part.replace(path)
    except (OSError, SafetensorError) as error:
        raise FailureError(
            f"cannot write {path} ({one_line(error)}); free some space or choose another place"
        ) from None
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write an object as a JSON file; an empty one removes the file instead."""
    if not value:
        path.unlink(missing_ok=True)
    else:
        text = json.dumps(value, indent=2, ensure_ascii=False)
        replace_with(path, lambda part: part.write_text(text, "utf-8"))
