"""Images per second of one core: Vitrail's input pipeline beside torchvision's, as ratios.

    python benchmarks/decoding.py [FOLDER] [--images 64] [--rounds 15] [--side 500]
    python benchmarks/decoding.py --device cuda        also decodes on the GPU (nvJPEG)

FOLDER has class folders of images; without it, JPEG files are made whose long side is --side.
torchvision's pipeline opens a file with Pillow, crops at random to 224 pixels, mirrors half of the
images and makes batches of bytes. Ours with `system.augment=cpu` does the same; with
`system.augment=device`, the processor only cuts the crops out, and the device resizes them. From a
packed store, nothing is decoded. All run on one thread, one after the other in every round, and the
clock is the thread's own, which stands still while other processes run (with --device, it is the
wall's). The ratio is the median of the rounds', and above 1 Vitrail is faster.
"""

import argparse
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import PIL
import torch
import torchvision
from PIL import Image
from torchvision.io import decode_jpeg
from torchvision.transforms import v2

from vitrail.config import Augment
from vitrail.data.augment import training_transform
from vitrail.data.batch_augment import BatchAugment
from vitrail.data.dataset import Source, Splits
from vitrail.data.decoded import CutImages, cut_parts, decode_images
from vitrail.data.folder import FolderSource, open_folder
from vitrail.data.loader import Augmented
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.store import open_store, pack_data
from vitrail.devices import Devices, processor

CPU = Devices(torch.device("cpu"), torch.float32)
PREPROCESSING = Preprocessing(size=(224, 224))
AUGMENT = Augment(crop="inception", area=0.08)  # torchvision's own area
CHUNK = 32


def write_photos(folder: Path, count: int, side: int) -> None:
    """JPEG files with shapes of every size and some noise, about as large as photographs'."""
    rng = np.random.default_rng(0)
    size = (side, 3 * side // 4)
    for number in range(count):
        pixels = np.zeros((size[1], size[0], 3))
        for cells in (4, 16, 64, 256):
            noise = rng.integers(0, 256, (cells, cells, 3), dtype=np.uint8)
            layer = Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC)
            pixels += (np.asarray(layer) - 128.0) * 2 / cells**0.5
        image = Image.fromarray((pixels + 128).clip(0, 255).astype(np.uint8))
        path = folder / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path, quality=90)


def theirs(source: FolderSource) -> Callable[[int], object]:
    """torchvision's usual pipeline."""
    crop = v2.RandomResizedCrop(224)
    transform = v2.Compose([crop, v2.RandomHorizontalFlip(), v2.PILToTensor()])

    def read(first: int) -> None:
        files = [source.files[i % len(source.files)] for i in range(first, first + CHUNK)]
        paths = [source.root / file for file in files]
        torch.stack([transform(Image.open(path).convert("RGB")) for path in paths])

    return read


def on_cpu(source: Source) -> Callable[[int], object]:
    """Every image augmented by the processor."""
    dataset = Augmented(source, training_transform(PREPROCESSING, AUGMENT), seed=0)
    total = len(source.targets)
    return lambda first: torch.stack(
        [dataset[i, i % total][0] for i in range(first, first + CHUNK)]
    )


def cut(source: Source) -> Callable[[int], object]:
    """The processor's part of augmentation on the device: images are decoded every time."""
    dataset = CutImages(source, BatchAugment(PREPROCESSING, AUGMENT, seed=0))
    total = len(source.targets)
    return lambda first: dataset.__getitems__([(i, i % total) for i in range(first, first + CHUNK)])


def cut_decoded(source: Source) -> Callable[[int], object]:
    """The same from decoded images."""
    augment = BatchAugment(PREPROCESSING, AUGMENT, seed=0)
    found = decode_images(source, augment, CPU, place="disk", workers=0)
    assert found is not None
    images = found[0]

    def read(first: int) -> None:
        positions = np.arange(first, first + CHUNK)
        indices = positions % len(source.targets)
        boxes = augment.boxes(positions, images.shapes[indices])
        cut_parts([images.image(index) for index in indices.tolist()], boxes)

    return read


def on_gpu(source: FolderSource, device: str) -> Callable[[int], object]:
    """nvJPEG: batches of files decoded by the GPU, and nothing else."""
    paths = [source.root / file for file in source.files]

    def read(first: int) -> None:
        chosen = [paths[i % len(paths)] for i in range(first, first + CHUNK)]
        data = [
            torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8) for path in chosen
        ]
        decode_jpeg(data, device=device)
        torch.cuda.synchronize()

    return read


def prepare(folder: Path, store: Path, device: str) -> dict[str, Callable[[int], object]]:
    """The pipelines by name; each reads the images from a position on."""
    source = open_folder(folder).part("train")
    assert isinstance(source, FolderSource)
    size = statistics.mean((source.root / file).stat().st_size for file in source.files)
    print(f"{len(source.files)} files, {size / 1e3:.0f} kB on average")
    pack_data(Splits(name="photos", train=source), store)
    packed = open_store(store).part("train")
    gpu = {} if device == "cpu" else {"files, nvJPEG": on_gpu(source, device)}
    return {
        "torchvision": theirs(source),
        "files, cpu": on_cpu(source),
        "files, device": cut(source),
        "store, cpu": on_cpu(packed),
        "store, device": cut_decoded(packed),
        **gpu,
    }


def measured(
    candidates: dict[str, Callable[[int], object]],
    rounds: int,
    images: int,
    clock: Callable[[], float],
) -> dict[str, list[float]]:
    """Images per second in each round."""
    speeds: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(rounds + 1):
        for name, read in candidates.items():
            start = clock()
            for first in range(0, images, CHUNK):
                read(number * images + first)
            speed = images / (clock() - start)
            speeds[name] += [speed] * bool(number)  # the first round warms up
    return speeds


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--side", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    versions = (torch.__version__, torchvision.__version__, PIL.__version__)
    print("torch {}, torchvision {}, Pillow {}".format(*versions), end=" · ")
    print(f"Python {platform.python_version()} · {processor()}, one thread")
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary) / "photos"
        if arguments.folder is None:
            write_photos(folder, arguments.images, arguments.side)
        pipelines = prepare(folder, Path(temporary) / "store", arguments.device)
        clock = time.thread_time if arguments.device == "cpu" else time.perf_counter
        speeds = measured(pipelines, arguments.rounds, arguments.images, clock)
    print(f"{'':16}{'images/s':>10}{'ratio':>8}{'lowest':>8}{'highest':>8}")
    for name, values in speeds.items():
        ratios = [ours / other for ours, other in zip(values, speeds["torchvision"], strict=True)]
        row = (statistics.median(ratios), min(ratios), max(ratios))
        print(f"{name:16}{statistics.median(values):10,.0f}" + "".join(f"{x:8.2f}" for x in row))


if __name__ == "__main__":
    main()
