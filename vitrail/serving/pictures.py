"""From uploaded bytes to what a model takes, without trusting them."""

from dataclasses import dataclass
from io import BytesIO

from jaxtyping import Float
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from vitrail.data.decode import load_bounded, opened, readable, upright
from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import VitrailError
from vitrail.serving.limits import RequestError
from vitrail.serving.uploads import Upload


@dataclass(frozen=True)
class Prepared:
    """A picture as a model takes it."""

    pixels: Float[Tensor, "c y x"]
    crop: tuple[float, float, float, float]
    """Left, top, right and bottom of what the model is shown, as fractions of the picture."""


def prepare(upload: Upload, preprocess: Preprocessing, most: int) -> Prepared:
    """A picture decoded and resized; `most` pixels, or it is refused before it is decoded."""
    try:
        picture = decode(upload, preprocess, most)
        return Prepared(preprocess(picture), crop(preprocess, picture))
    except VitrailError as error:
        raise RequestError(422, "not_a_picture", str(error)) from None
    except MemoryError:
        told = f"{upload.name} cannot be decoded: it takes too much memory"
        raise RequestError(422, "not_a_picture", told) from None


def decode(upload: Upload, preprocess: Preprocessing, most: int) -> Image.Image:
    """The picture, upright; its header alone is read before its size is known to be acceptable."""
    with readable(upload.name), opened(BytesIO(upload.data)) as image:
        if image.format == "JPEG2000":  # no browser shows it, and its decoder is slow
            raise UnidentifiedImageError
        refuse_bombs(upload.name, image.size, preprocess, most)
        load_bounded(image)
        return upright(image)


def refuse_bombs(name: str, size: tuple[int, int], preprocess: Preprocessing, most: int) -> None:
    """Few bytes can describe many pixels, and so can a thin line that is to become 224 rows."""
    width, height = size
    if width * height > most:
        told = f"{name} has {width} x {height} pixels, more than {most / 1e6:g} million"
        raise RequestError(413, "too_many_pixels", told)
    rows, columns = preprocess.resized(max(height, 1), max(width, 1))
    if rows * columns > max(most, 4 * preprocess.size[0] * preprocess.size[1]):
        told = f"{name} is too narrow: at {width} x {height} pixels nothing of it would be seen"
        raise RequestError(413, "too_many_pixels", told)


def crop(preprocess: Preprocessing, picture: Image.Image) -> tuple[float, float, float, float]:
    """Which part of a picture is left by resizing and cropping."""
    rows, columns = preprocess.resized(picture.height, picture.width)
    top, left = ((rows - preprocess.size[0]) / 2, (columns - preprocess.size[1]) / 2)
    return left / columns, top / rows, 1 - left / columns, 1 - top / rows
