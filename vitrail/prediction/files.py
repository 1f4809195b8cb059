"""The pictures that are to be judged: files, all that lies below folders, standard input."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path

import numpy as np
from jaxtyping import Int
from PIL import Image

from vitrail.data.decode import decode, open_image
from vitrail.data.folder import images_below
from vitrail.errors import VitrailError

STANDARD_INPUT = "-"


@dataclass(frozen=True)
class Files:
    """Pictures by their paths; a source without classes."""

    names: Sequence[str]
    labels: tuple[str, ...] = ()

    @property
    def targets(self) -> Int[np.ndarray, " n"]:
        return np.zeros(len(self.names), dtype=np.int64)

    @property
    def blocks(self) -> Int[np.ndarray, " n"]:
        return np.zeros(len(self.names), dtype=np.int64)

    def image(self, index: int) -> Image.Image:
        name = self.names[index]
        if name == STANDARD_INPUT:
            return decode(BytesIO(self.standard_input), "standard input")
        if Path(name).is_dir():
            raise VitrailError(f"{name} is a folder without pictures")
        return open_image(Path(name))

    @cached_property
    def standard_input(self) -> bytes:
        """Read once, however often it is named."""
        return sys.stdin.buffer.read()


def find(images: str | Path | Sequence[str | Path]) -> Files:
    """Every picture, in the order given; a folder's own by name, however deep."""
    given = [images] if isinstance(images, (str, Path)) else images
    names = [name for path in given for name in below(path)]
    if not names:
        raise VitrailError("no pictures to look at; name files or folders")
    return Files(names)


def below(path: str | Path) -> Iterator[str]:
    """The pictures of a folder, or the path itself."""
    if str(path) == STANDARD_INPUT or not Path(path).is_dir():
        yield str(path)
        return
    names = images_below(Path(path), ".")
    yield from (str(Path(path) / name) for name in names) if names else [str(path)]
