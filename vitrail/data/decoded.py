"""Training images that are decoded only once: kept on the device, in memory or on disk.

Where they are kept changes nothing about the pixels, which depend on the files and the settings.
"""

import hashlib
import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Int, UInt8
from torch import Tensor
from torch.utils.data import Dataset

from vitrail.console import Advance, byte_size
from vitrail.data.batch_augment import BatchAugment, Boxes, Images
from vitrail.data.contents import source_digest
from vitrail.data.dataset import Broken, Source, pixels_or_reason
from vitrail.data.loader import Chunk, RankBatchSampler, TrainingBatch, decodable, read_all
from vitrail.data.store import DecodedPart, packed_part, read_decoded, write_decoded
from vitrail.devices import Devices, available_memory
from vitrail.errors import FailureError, VitrailError, one_line
from vitrail.files import BoundedFolder, cache_folder

Place = Literal["auto", "device", "memory", "disk", "none"]
"""Where decoded images are kept."""

_SAMPLE = 64
"""Images that are decoded to estimate the size of all."""
_DEVICE_SHARE, _MEMORY_SHARE = 0.3, 0.35
"""The largest share of free memory that decoded images may take. Building a cache in memory takes
twice its size for a moment."""
_RULE = 1
"""Increased when the pixels of decoded images change, so that older caches are not used."""
_ABANDONED = 3600
"""Seconds after which a file that nobody writes to is unfinished."""
_NONE = torch.zeros(0, dtype=torch.uint8)
_PIECE = 1 << 26
"""Bytes that are copied to the device at a time."""
_CUT_AT_ONCE = 1 << 27
"""Pixels that are addressed at once on the device: an address takes eight bytes."""
_GROUP_BYTES = 1 << 24
_LARGEST_GROUP = 16
"""Small images are augmented for up to 16 steps at a time: launching a kernel takes as long for one
image as for a thousand."""


@dataclass(frozen=True)
class DecodedImages:
    """The pixels of all training images, one after another."""

    pixels: UInt8[Tensor, " bytes"]
    """On the device or, where they do not fit there, in memory or mapped from a file."""
    offsets: Int[np.ndarray, " n"]
    shapes: Int[np.ndarray, "n 2"]
    """Rows and columns."""
    numbers: Int[np.ndarray, " n"]
    """The image to use in place of each: the next one if it cannot be decoded."""
    channels: int
    broken: Sequence[Broken] = ()

    def cut(
        self,
        indices: Int[np.ndarray, " b"],
        boxes: Boxes,
        flips: Bool[np.ndarray, " b"],
        device: torch.device,
    ) -> Images:
        """Parts of images, mirrored where requested, each at the top left of one as large as the
        largest of them; black where a box reaches beyond its image."""
        if not self.pixels.is_cuda:
            images = [self.image(index) for index in indices.tolist()]
            if device.type == "cpu":
                return cut_boxes(images, boxes, flips).permute(0, 3, 1, 2)
            # Only what is cut out is copied to the device.
            parts, boxes = cut_parts(images, boxes)
            return parts.on(device).cut(np.arange(len(boxes)), boxes, flips, device)
        rows, columns = boxes[:, 2:].max(0).tolist()
        part = max(1, _CUT_AT_ONCE // (rows * columns))
        starts = range(0, len(indices), part)
        slices = [slice(start, start + part) for start in starts]
        size = (rows, columns)
        return torch.cat([self._gather(indices[s], boxes[s], flips[s], size) for s in slices])

    def on(self, device: torch.device) -> "DecodedImages":
        """On a device, to which the pixels are copied from pinned memory."""
        if device.type == "cpu":
            return self
        return replace(self, pixels=self.pixels.pin_memory().to(device, non_blocking=True))

    def image(self, index: int) -> UInt8[np.ndarray, "y x c"]:
        """The pixels of an image in memory."""
        rows, columns = self.shapes[index].tolist()
        start = int(self.offsets[index])
        part = self.pixels[start : start + rows * columns * self.channels]
        return part.numpy().reshape(rows, columns, self.channels)

    def _gather(
        self,
        indices: Int[np.ndarray, " b"],
        boxes: Boxes,
        flips: Bool[np.ndarray, " b"],
        size: tuple[int, int],
    ) -> Images:
        table = np.column_stack([self.offsets[indices], self.shapes[indices], boxes, flips])
        columns = torch.from_numpy(table).to(self.pixels.device, non_blocking=True)[:, :, None]
        start, height, width, top, left, _, wide, flip = columns.unbind(1)
        y, x = (torch.arange(n, device=self.pixels.device) for n in size)
        x = torch.where(flip > 0, wide - 1 - x, x) + left
        y = top + y
        inside = ((y >= 0) & (y < height))[:, :, None] & ((x >= 0) & (x < width))[:, None]
        y, x = y.clamp(min=0).minimum(height - 1), x.clamp(min=0).minimum(width - 1)
        # Of whole pixels: an address takes eight bytes.
        address = (start // self.channels + y * width)[:, :, None] + x[:, None]
        found = self.pixels.view(-1, self.channels)[address] * inside[..., None]
        return found.permute(0, 3, 1, 2).contiguous()


def cut_parts(
    images: Sequence[UInt8[np.ndarray, "_y _x c"]], boxes: Boxes
) -> tuple[DecodedImages, Boxes]:
    """What the boxes contain of each image, as images of their own, and the boxes in them."""
    starts = boxes[:, :2].clip(0)
    ends = np.minimum(boxes[:, :2] + boxes[:, 2:], [image.shape[:2] for image in images])
    shapes, channels = ends - starts, images[0].shape[2]
    lengths = shapes.prod(1) * channels
    offsets = np.cumsum(lengths) - lengths
    pixels = np.empty(int(lengths.sum()), dtype=np.uint8)
    for target, image, (top, left), (bottom, right) in zip(
        np.split(pixels, offsets[1:]), images, starts.tolist(), ends.tolist(), strict=True
    ):
        part = image[top:bottom, left:right]
        target.reshape(part.shape)[:] = part
    parts = DecodedImages(
        torch.from_numpy(pixels), offsets, shapes, np.arange(len(images)), channels
    )
    return parts, np.concatenate([boxes[:, :2] - starts, boxes[:, 2:]], 1)


def cut_boxes(
    images: Sequence[UInt8[np.ndarray, "_y _x c"]], boxes: Boxes, flips: Bool[np.ndarray, " b"]
) -> UInt8[Tensor, "b y x c"]:
    """`DecodedImages.cut` for single images in memory."""
    rows, columns = boxes[:, 2:].max(0).tolist()
    cut = np.zeros((len(images), rows, columns, images[0].shape[2]), dtype=np.uint8)
    for target, image, box, flip in zip(cut, images, boxes.tolist(), flips, strict=True):
        top, left, height, width = box
        y, x = max(0, -top), max(0, -left)
        part = image[max(0, top) : top + height, max(0, left) : left + width]
        end = x + part.shape[1]
        if flip:
            part, x, end = part[:, ::-1], width - end, width - x
        target[y : y + part.shape[0], x:end] = part
    return torch.from_numpy(cut)


# Decoding


@dataclass(frozen=True)
class CutImages(Dataset[Any]):
    """Boxes of training images that are decoded every time, by chunks of (position, index)."""

    source: Source
    augment: BatchAugment

    def __getitem__(self, index: tuple[int, int]) -> Any:
        return self.__getitems__([index])

    def __getitems__(self, chunk: list[tuple[int, int]]) -> Any:
        found = [decodable(self.source, index, self.augment.side) for _, index in chunk]
        images = [self.augment.decoded(image) for image, _, _ in found]
        positions = np.array([position for position, _ in chunk])
        boxes = self.augment.boxes(positions, np.array([image.shape[:2] for image in images]))
        parts, boxes = cut_parts(images, boxes)
        numbers = [number for _, number, _ in found]
        broken = [pair for _, _, pairs in found for pair in pairs]
        # A tensor of its own, so that a worker hands it over in shared memory.
        return parts.pixels, replace(parts, pixels=_NONE), boxes, positions, numbers, broken

    def finish(self, chunk: Any, device: torch.device) -> Chunk:
        """Augments a chunk on the device."""
        pixels, parts, boxes, positions, numbers, broken = chunk
        flips = self.augment.flips(positions)
        parts = replace(parts, pixels=pixels).on(device)
        cut = parts.cut(np.arange(len(boxes)), boxes, flips, device)
        images = self.augment(cut, boxes, positions)
        return images, torch.from_numpy(self.source.targets[numbers]), broken


def decode_images(
    source: Source,
    augment: BatchAugment,
    devices: Devices,
    *,
    place: Place,
    workers: int,
    progress: Advance | None = None,
) -> tuple[DecodedImages, str] | None:
    """Decodes every image once, and describes where the images are kept; None if they are not kept.

    Several processes share a file on disk. A file, or a packed store, is copied to the device if it
    fits there.
    """
    packed = _packed(source, augment)
    if place == "none" and packed is None:
        return None
    size = decoded_bytes(source, augment)
    # One process's, or they might decide differently: what is free changes all the time.
    room = devices.broadcast(_room(devices))
    place = _choose(place, size, room, devices, stored=packed is not None)
    if place == "none":
        return None
    if packed is not None:
        part, where = packed, "the packed store"
    elif place == "disk" or size > room["memory"]:
        part = _on_disk(source, augment, devices, size, progress)
        where = "the disk cache"
    else:
        part, where = _in_memory(source, augment, workers, progress), "memory"
    images = _complete(source, part, augment.channels)
    if place != "memory" and size <= room["device"]:
        images, where = _copied(images, devices.device), f"{devices.device.type} memory"
    return images, f"{len(part.shapes):,} decoded images, {byte_size(size)} in {where}"


def _packed(source: Source, augment: BatchAugment) -> DecodedPart | None:
    """The images of a packed store whose pixels need no change."""
    part = packed_part(source)
    return part if part is not None and augment.keeps(part.shapes) else None


def _choose(
    place: Place, size: int, room: Mapping[str, int], devices: Devices, stored: bool
) -> Place:
    """Where decoded images are kept; `stored` ones are on disk in any case."""
    if place == "device" and devices.device.type != "cuda":
        place = "memory"
    if place in room and size > room[place] and not (stored and place != "device"):
        raise VitrailError(
            f"system.cache={place}: the decoded images take about {byte_size(size)}, and may take "
            f"{byte_size(room[place])}; use system.cache=auto"
        )
    if stored and place != "device":
        return "disk"
    if place != "auto":
        return place
    # Several processes would each decode all images.
    order: tuple[Place, ...] = ("device", "memory") if devices.world == 1 else ()
    fitting = [name for name in order if size <= min(room[name], room["memory"])]
    return next(iter(fitting), "disk" if size <= room["disk"] else "none")


def decoded_bytes(source: Source, augment: BatchAugment) -> int:
    """The size of all decoded images, estimated from some of them unless they have one size."""
    total = len(source.targets)
    if min(augment.decoded_size):
        return total * augment.channels * augment.decoded_size[0] * augment.decoded_size[1]
    some = sorted(set(np.linspace(0, total - 1, min(_SAMPLE, total), dtype=int).tolist()))
    images = [pixels_or_reason(source, index, augment.side) for index in some]
    sizes = [augment.decoded(image).size for image in images if not isinstance(image, str)]
    return int(total * np.mean(sizes)) if sizes else 0


def _room(devices: Devices) -> dict[str, int]:
    """The bytes that decoded images may take on the device, in memory and on disk."""
    device = devices.device
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    return {
        "device": int(_DEVICE_SHARE * free),
        "memory": int(_MEMORY_SHARE * available_memory() / devices.world),
        "disk": _disk_cache().limit(),
    }


def _disk_cache() -> BoundedFolder:
    folder = cache_folder() / "decoded"
    return BoundedFolder(folder, "VITRAIL_DECODED_CACHE_GB", gigabytes=100, share=0.5)


def _in_memory(
    source: Source, augment: BatchAugment, workers: int, progress: Advance | None
) -> DecodedPart:
    found: dict[int, Any] = dict(
        read_all(source, augment.decoded, side=augment.side, workers=workers, progress=progress)
    )
    good = [index for index in sorted(found) if not isinstance(found[index], Broken)]
    shapes = np.array([found[index].shape[:2] for index in good], dtype=np.int64).reshape(-1, 2)
    pixels = [found.pop(index).reshape(-1) for index in good]
    broken = [one for one in found.values() if isinstance(one, Broken)]
    lengths = shapes.prod(1) * augment.channels
    return DecodedPart(
        pixels=np.concatenate(pixels) if pixels else np.zeros(0, dtype=np.uint8),
        offsets=np.cumsum(lengths) - lengths,
        shapes=shapes,
        indices=np.array(good, dtype=np.int64),
        broken=broken,
    )


def _on_disk(
    source: Source, augment: BatchAugment, devices: Devices, size: int, progress: Advance | None
) -> DecodedPart:
    """Decoded images from the cache folder; if they are missing, one process of each machine writes
    them."""
    rule = (_RULE, augment.preprocessing, augment.augment.crop)
    # Reading all files once more, to hash them, is enough for one process.
    key = devices.broadcast(f"{rule!r} {source_digest(source)}" if devices.main else "")
    name = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
    cache = _disk_cache()
    stem = cache.folder / name
    problem = {}
    if devices.local_rank == 0:
        files = [stem.with_suffix(suffix) for suffix in (".pixels", ".npz")]
        try:
            if read_decoded(stem, source, augment.channels) is None:
                _delete_unfinished(cache.folder)
                cache.make_room(size)
                write_decoded(source, stem, augment.decoded, augment.side, progress)
            for path in files:
                os.utime(path)  # used now
        except OSError as error:
            problem = {f"cannot use {stem}.pixels ({one_line(error)})": ""}
        except FailureError as error:
            problem = {str(error): ""}
    # The other processes wait here.
    problems = devices.union(problem)
    part = None if problems else read_decoded(stem, source, augment.channels)
    if part is None:
        why = "; ".join(problems) or f"{stem}.pixels cannot be read back"
        raise FailureError(f"{why}; system.cache=none decodes images in every epoch instead")
    return part


def _delete_unfinished(folder: Path) -> None:
    """Deletes what processes that were killed had begun to write."""
    for path in folder.glob(".*.part"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _ABANDONED:
                path.unlink()


def _complete(source: Source, part: DecodedPart, channels: int) -> DecodedImages:
    """With an entry for every image of the source: the next one's where one cannot be decoded."""
    total = len(source.targets)
    if not len(part.indices):
        raise VitrailError(f"none of the {total} training images can be decoded")
    following = np.searchsorted(part.indices, np.arange(total)) % len(part.indices)
    with warnings.catch_warnings():
        # Nothing writes to it: it may be a file that is mapped for reading.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        pixels = torch.from_numpy(part.pixels)
    return DecodedImages(
        pixels=pixels,
        offsets=part.offsets[following],
        shapes=part.shapes[following],
        numbers=part.indices[following],
        channels=channels,
        broken=part.broken,
    )


def _copied(images: DecodedImages, device: torch.device) -> DecodedImages:
    """On the device: its images alone, of a store that has others too."""
    starts, first, inverse = np.unique(images.offsets, return_index=True, return_inverse=True)
    lengths = images.shapes[first].prod(1) * images.channels
    offsets = np.cumsum(lengths) - lengths
    copy = torch.empty(int(lengths.sum()), dtype=torch.uint8, device=device)
    for source, target, length in _runs(starts, offsets, lengths):
        for start in range(0, length, _PIECE):  # a mapped file is read in pieces
            end = min(start + _PIECE, length)
            copy[target + start : target + end] = images.pixels[source + start : source + end]
    return replace(images, pixels=copy, offsets=offsets[inverse])


def _runs(
    starts: Int[np.ndarray, " n"], targets: Int[np.ndarray, " n"], lengths: Int[np.ndarray, " n"]
) -> list[tuple[int, int, int]]:
    """Images that follow each other, as one: where they are, where they go and their bytes."""
    gaps = np.flatnonzero(starts[1:] != starts[:-1] + lengths[:-1]) + 1
    first, end = np.append(0, gaps), np.append(gaps, len(starts))
    total = np.append(targets, lengths.sum())
    return list(
        zip(
            starts[first].tolist(),
            targets[first].tolist(),
            (total[end] - targets[first]).tolist(),
            strict=True,
        )
    )


# Batches


def decoded_batches(
    images: DecodedImages,
    augment: BatchAugment,
    targets: Int[np.ndarray, " n"],
    sampler: RankBatchSampler,
    device: torch.device,
) -> Iterator[TrainingBatch]:
    """Endless batches of augmented images on the device, from step `sampler.start` on."""
    rows, columns = augment.preprocessing.size
    batch = sampler.size * rows * columns * augment.channels
    steps = max(1, min(_GROUP_BYTES // batch, _LARGEST_GROUP)) if images.pixels.is_cuda else 1
    classes = torch.from_numpy(targets).to(device)
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def cut(first: int) -> tuple[Images, Boxes, Int[np.ndarray, " b"], Int[np.ndarray, " b"]]:
        positions = np.concatenate([sampler.positions(first + i) for i in range(steps)])
        indices = sampler.order.indices(positions)
        boxes = augment.boxes(positions, images.shapes[indices])
        with torch.cuda.stream(stream):  # each thread has a current one of its own
            pixels = images.cut(indices, boxes, augment.flips(positions), device)
        return pixels, boxes, positions, images.numbers[indices]

    # In memory, the parts are copied by another thread; on the device, that is a matter of
    # launching kernels, on this thread's stream.
    with ThreadPoolExecutor(1) as pool:
        ahead: Future[Any] | None = None
        for first in count(sampler.start, steps):
            if images.pixels.is_cuda:
                pixels, boxes, positions, numbers = cut(first)
            else:
                pixels, boxes, positions, numbers = (ahead or pool.submit(cut, first)).result()
                ahead = pool.submit(cut, first + steps)
            augmented = augment(pixels, boxes, positions).chunk(steps)
            labels = classes[torch.from_numpy(numbers).to(device, non_blocking=True)].chunk(steps)
            for number in range(steps):
                yield TrainingBatch(
                    images=augmented[number],
                    targets=labels[number],
                    first=sampler.first(first + number),
                    overlap=sampler.overlap,
                )
