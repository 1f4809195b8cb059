"""What the model looks at: the folder `inspection` of a run as the page shows it."""

import io
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from vitrail.data.decode import load_bounded, opened
from vitrail.report.fields import Fields, as_number, is_number, read_object

MOST_BYTES = 400_000
"""Of one picture; a page of five megabytes is still an e-mail."""
MOST_PICTURES = 6
KINDS = {"PNG": "image/png", "JPEG": "image/jpeg"}


@dataclass(frozen=True)
class Distances:
    """Mean attention distance of the heads of one layer, in pixels."""

    layer: int
    heads: tuple[float, ...]
    uniform: float
    """That of a head that looks at all patches alike."""


@dataclass(frozen=True)
class Glance:
    """One test picture with its maps."""

    picture: str
    """A data URI: the picture and its maps side by side."""
    name: str
    truth: str
    guess: str
    probability: float


@dataclass(frozen=True)
class Inside:
    """All of it; empty where the run was not looked into."""

    filters: str = ""
    positions: str = ""
    distances: tuple[Distances, ...] = ()
    split: str = ""
    """The part of the data that the pictures are of."""
    n: int = 0
    """Pictures that the distances are averaged over."""
    glances: tuple[Glance, ...] = ()
    shows: tuple[str, ...] = ()
    """What stands side by side in each glance."""
    absent: tuple[str, ...] = ()
    """Why something is not there."""

    def __bool__(self) -> bool:
        return bool(self.filters or self.positions or self.distances or self.glances)


def read_inside(folder: Path) -> Inside:
    """What the folder holds; nothing where it is missing or broken, for it can be made again."""
    found, note = read_object(folder / "inspection.json")
    if note:
        return Inside()
    distance = found.fields("attention_distance")
    layers = [
        Distances(row.count("layer"), heads, row.number("uniform"))
        for row in distance.rows("layers")
        if (heads := tuple(as_number(value) for value in row.items("heads") if is_number(value)))
    ]
    images = found.rows("images")[:MOST_PICTURES]
    glances = [
        glance(image, embedded(folder / f"picture-{number}.jpg"))
        for number, image in enumerate(images, 1)
    ]
    return Inside(
        filters=embedded(folder / "filters.png"),
        positions=embedded(folder / "positions.png"),
        distances=tuple(layers),
        split=found.text("split"),
        n=distance.count("n"),
        glances=tuple(one for one in glances if one.picture),
        shows=shows(images),
        absent=tuple(found.fields("absent").text(key) for key in found.fields("absent").values),
    )


def glance(image: Fields, picture: str) -> Glance:
    """One picture and what is said about it."""
    name, truth, guess = (image.text(key) for key in ("name", "truth", "guess"))
    return Glance(picture, name, truth, guess, image.number("probability"))


def shows(images: Sequence[Fields]) -> tuple[str, ...]:
    """What is drawn of the pictures, from left to right."""
    having = images[0] if images else Fields()
    return (
        "what the model sees",
        *(["attention rollout"] if having.items("rollout") else []),
        *(["rollout for its answer"] if having.items("gradient_rollout") else []),
        "the first three principal components of its patch features",
    )


def embedded(path: Path) -> str:
    """A picture as a data URI; empty where there is none that a page can carry."""
    try:
        data = path.read_bytes()
        with opened(io.BytesIO(data)) as picture:
            load_bounded(picture)
            kind = KINDS.get(picture.format or "")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return ""
    if kind is None or len(data) > MOST_BYTES:
        return ""
    return f"data:{kind};base64," + b64encode(data).decode()
