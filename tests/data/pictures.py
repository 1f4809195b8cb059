"""Small pictures in folders and tar files."""

import io
import tarfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from vitrail.data.dataset import Source


def photo(seed: int = 0, height: int = 12, width: int = 16) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def encoded(seed: int = 0, suffix: str = "png") -> bytes:
    """A picture's file; its pixels survive in all formats but JPEG."""
    file = io.BytesIO()
    photo(seed).save(file, Image.registered_extensions()[f".{suffix.lower()}"])
    return file.getvalue()


def write(path: Path, seed: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encoded(seed, path.suffix[1:]))
    return path


def write_classes(folder: Path, counts: dict[str, int], start: int = 0) -> Path:
    """`folder/<class>/<n>.png`, each picture with pixels of its own."""
    seed = start
    for label, count in counts.items():
        for number in range(count):
            write(folder / label / f"{number}.png", seed)
            seed += 1
    return folder


def write_tar(path: Path, files: dict[str, bytes | str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in files.items():
            body = data.encode() if isinstance(data, str) else data
            member = tarfile.TarInfo(name)
            member.size = len(body)
            tar.addfile(member, io.BytesIO(body))
    return path


def labeled(count: int, classes: int = 2, start: int = 0) -> dict[str, bytes | str]:
    """WebDataset samples: `000.png` beside `000.cls`."""
    files: dict[str, bytes | str] = {}
    for number in range(start, start + count):
        files[f"{number:03d}.png"] = encoded(number)
        files[f"{number:03d}.cls"] = str(number % classes)
    return files


def same(picture: Image.Image, other: Image.Image) -> bool:
    return picture.mode == other.mode and picture.tobytes() == other.tobytes()


def contents(source: Source) -> dict[str, str]:
    """The class of each picture by its name."""
    return {
        name: source.labels[target]
        for name, target in zip(source.names, source.targets, strict=True)
    }


def bit_resized(image: Image.Image, side: int) -> torch.Tensor:
    """As big_transfer's `Resize((side, side))`."""
    resized = image.convert("RGB").resize((side, side), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(resized)).permute(2, 0, 1)


def window(image: torch.Tensor, whole: torch.Tensor) -> tuple[int, int, bool] | None:
    """Top and left of an image inside a larger one, up to rounding, and whether it is mirrored."""
    rows, columns = image.shape[1:]
    fits = whole[:, : whole.shape[1] - rows + 8, : whole.shape[2] - columns + 8]
    places = fits.short().unfold(1, 8, 1).unfold(2, 8, 1)
    for mirrored in (False, True):
        shown = (image.flip(2) if mirrored else image).short()
        corner = shown[:, None, None, :8, :8]
        near = ((places - corner).abs().amax((0, 3, 4)) <= 1).nonzero().tolist()
        for top, left in near:
            cut = whole[:, top : top + rows, left : left + columns]
            if (cut - shown).abs().max() <= 1:
                return top, left, mirrored
    return None
