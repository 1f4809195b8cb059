"""`load` and `save`: a model from any known checkpoint, and any known checkpoint from a model."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torchvision.models import ResNet50_Weights

from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import VitrailError, did_you_mean
from vitrail.model import Architecture, Classifier, build
from vitrail.model.checks import as_size
from vitrail.model.positions import Interpolation, resize_grid, resize_line
from vitrail.model.variants import name
from vitrail.model.vit import ViTArchitecture
from vitrail.weights import files, native
from vitrail.weights.download import fetch
from vitrail.weights.files import Contents
from vitrail.weights.format import Format, Size, Tensors
from vitrail.weights.google import GOOGLE
from vitrail.weights.huggingface import HUGGINGFACE
from vitrail.weights.layout import Entry, match, to_ours, to_theirs
from vitrail.weights.published import BUILTIN, NAMES, Published, find
from vitrail.weights.timm import TIMM
from vitrail.weights.torchvision import TORCHVISION

FORMATS = {known.name: known for known in (GOOGLE, TIMM, HUGGINGFACE, TORCHVISION)}
POSITIONS = r"^positions\.\d+\.(table|rows|columns)$|\.relative\.table$|\.offsets$"
CONTAINERS = {".npz", ".safetensors", ".pt", ".pth", ".bin"}
FormatName = Literal["google", "timm", "huggingface", "torchvision", "vitrail"]


class MismatchError(VitrailError):
    """A checkpoint does not fit its architecture; every key that differs is named."""

    def __init__(self, path: Path, found: Tensors, expected: Tensors) -> None:
        self.missing = [key for key in expected if key not in found]
        self.unexpected = [key for key in found if key not in expected]
        had, wanted = kinds(found), kinds(expected)
        self.misshapen = [
            f"{key} {had[key]} instead of {wanted[key]}"
            for key in wanted
            if key in had and had[key] != wanted[key]
        ]
        parts = ("missing", "unexpected", "misshapen")
        named = {kind: keys for kind in parts if (keys := getattr(self, kind))}
        told = [f"{len(keys)} {kind}: {', '.join(keys)}" for kind, keys in named.items()]
        super().__init__(f"{path} does not fit its architecture; {'; '.join(told)}")


def check(path: Path, found: Tensors, expected: Tensors) -> None:
    """Nothing, or a `MismatchError`; `expected` may be without numbers."""
    if kinds(found) != kinds(expected):
        raise MismatchError(path, found, expected)


def kinds(tensors: Tensors) -> dict[str, str]:
    """Shape of each tensor, and whether it holds whole numbers."""
    return {
        key: f"{tuple(x.shape)}{'' if x.is_floating_point() else ' of integers'}"
        for key, x in tensors.items()
    }


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint in our terms."""

    path: Path
    format: str
    architecture: Architecture
    tensors: Tensors
    labels: tuple[str, ...] = ()
    preprocessing: Preprocessing | None = None
    learnt_from: Mapping[str, Any] = field(default_factory=dict)


def load(
    source: str | Path,
    *,
    classes: int | None = None,
    size: int | Size | None = None,
    interpolation: Interpolation | None = None,
    **options: Any,
) -> Classifier:
    """The model of a weights file or folder in any known format, or of a published name.

    Another number of `classes` puts a zero head in place of the old one; another `size` (a side, or
    rows and columns) interpolates the positions, by the method of the checkpoint's family or the
    one named. `options` change no tensor: dropout, embedding_dropout, drop_path, gelu, eps.
    """
    checkpoint = open_checkpoint(source, size, interpolation)
    if options:
        checkpoint = replace(
            checkpoint, architecture=with_options(checkpoint.architecture, options)
        )
    model = to_model(checkpoint)
    if classes is not None and classes != checkpoint.architecture.classes:
        model.replace_head(classes)
    return model


def open_checkpoint(
    source: str | Path,
    size: int | Size | None = None,
    interpolation: Interpolation | None = None,
) -> Checkpoint:
    """A MODEL in our terms, its positions for images of `size`."""
    path, published = resolve(source)
    if size is None and published is not None:
        size = published.size
    size = None if size is None else as_size(size)
    checkpoint = read(path, size)
    if published is not None and checkpoint.preprocessing is not None:
        checkpoint = replace(
            checkpoint, preprocessing=published_preprocessing(checkpoint, published)
        )
    if interpolation is not None:
        architecture = with_options(checkpoint.architecture, {"interpolation": interpolation})
        checkpoint = replace(checkpoint, architecture=architecture)
    return checkpoint if size is None else resized(checkpoint, size)


def to_model(checkpoint: Checkpoint) -> Classifier:
    """The model, or the full list of what does not fit; its tensors are the checkpoint's own."""
    with torch.device("meta"):
        model = build(checkpoint.architecture)
    check(checkpoint.path, checkpoint.tensors, model.state_dict())
    tensors = {key: x.contiguous() for key, x in one_precision(checkpoint.tensors).items()}
    model.load_state_dict(tensors, assign=True)
    model.origin = checkpoint.format
    model.labels, model.learnt_from = checkpoint.labels, checkpoint.learnt_from
    model.preprocess = checkpoint.preprocessing
    return model.eval()


def one_precision(tensors: Tensors) -> Tensors:
    """Tensors of several precisions in the widest of them: a layer cannot compute with two."""
    precisions = {x.dtype for x in tensors.values() if x.is_floating_point()}
    if len(precisions) < 2:
        return tensors
    widest = reduce(torch.promote_types, precisions)
    return {key: x.to(widest) if x.is_floating_point() else x for key, x in tensors.items()}


def with_options(architecture: Architecture, options: dict[str, Any]) -> Architecture:
    """The architecture with settings that change no tensor."""
    if not isinstance(architecture, ViTArchitecture):
        raise VitrailError(f"{name(architecture)} takes no {', '.join(options)}")
    allowed = {"dropout", "embedding_dropout", "drop_path", "interpolation", "gelu", "eps"}
    if wrong := set(options) - allowed:
        raise VitrailError(f"cannot change {', '.join(sorted(wrong))} of trained weights")
    return replace(architecture, **options)


def resolve(source: str | Path) -> tuple[Path, Published | None]:
    """Where a MODEL lies: a path as it is, a published name or an address once fetched.

    A folder comes before a published name, which it may be a copy of, but `./builtin` is a folder.
    """
    path = Path(source)
    if isinstance(source, Path) or (os.path.lexists(path) and source != BUILTIN.name):
        return path, None
    if published := find(source):
        return fetch(published.source), published
    if source.startswith(("hub:", "https://", "http://")):
        return fetch(source), None
    hint = did_you_mean(source, list(NAMES))
    raise VitrailError(f"'{source}' is neither a file nor a published name{hint}")


def read(path: Path, wish: Size | None = None, known_size: Size | None = None) -> Checkpoint:
    """Recognise a checkpoint and put it into our terms.

    `wish` is the size the user wants, `known_size` that of the images the file is for, where the
    caller knows it.
    """
    contents = replace(files.read(path), size=known_size)
    if native.recognise(contents):
        told = native.describe(contents)
        check(path, contents.tensors, shapes(told.architecture))
        return Checkpoint(path=path, format="vitrail", tensors=contents.tensors, **told._asdict())
    for known in FORMATS.values():
        if known.recognise(contents):
            return translate(known, contents, wish)
    shown = ", ".join(list(contents.tensors)[:3]) or "nothing"
    raise VitrailError(
        f"{path} is no checkpoint of a known architecture (it holds {shown} …); "
        f"known are {', '.join(FORMATS)} and vitrail"
    )


def translate(known: Format, contents: Contents, wish: Size | None) -> Checkpoint:
    """Their tensors under our names, with the architecture they imply."""
    # Tensors and config.json may hold anything: whatever they upset is one line about this file.
    with files.parsing(contents.path, f"{known.name} checkpoint"):
        contents = replace(contents, tensors=known.normalise(contents.tensors))
        architecture = known.describe(contents, wish)
        if isinstance(architecture, ViTArchitecture):
            told: dict[str, Any] = {"interpolation": known.interpolation}
            architecture = replace(
                known.numerics(architecture), **told | known.exceptions(contents)
            )
        labels = known.labels(contents)
        preprocessing = known.preprocessing(contents, architecture)
    wanted = shapes(architecture)
    matched = place(known, architecture, wanted)
    check(contents.path, contents.tensors, to_theirs(matched, wanted))
    if not labels and architecture.classes == 1000:
        # Nobody else publishes files of exactly a thousand classes without their names.
        labels = tuple(ResNet50_Weights.DEFAULT.meta["categories"])
    return Checkpoint(
        path=contents.path,
        format=known.name,
        architecture=architecture,
        tensors=to_ours(matched, contents.tensors),
        labels=labels if len(labels) == architecture.classes else (),
        preprocessing=preprocessing,
    )


def place(known: Format, architecture: Architecture, tensors: Tensors) -> list[Entry]:
    """Where each of our tensors is in a format; an error names those that have no place there."""
    matched, homeless = match(known.table(architecture), tensors)
    if homeless:
        raise VitrailError(f"{known.name} has no place for {', '.join(homeless)}")
    return matched


def shapes(architecture: Architecture) -> dict[str, Tensor]:
    """Every tensor of the architecture, without its numbers."""
    with torch.device("meta"):
        return build(architecture).state_dict()


def resized(checkpoint: Checkpoint, size: Size) -> Checkpoint:
    """The checkpoint for images of another size; class slots stay as they are."""
    old = checkpoint.architecture
    if size == old.size:
        return checkpoint
    new = replace(old, size=size)
    wanted = shapes(new)
    tensors = dict(checkpoint.tensors)
    for key, table in tensors.items():
        if not re.search(POSITIONS, key):
            continue
        if table.ndim == 2:  # rows, columns, offsets: one axis each
            tensors[key] = resize_line(table, wanted[key].shape[0])
        elif isinstance(old, ViTArchitecture) and isinstance(new, ViTArchitecture):
            tensors[key] = resize_grid(table, old.grid, new.grid, old.interpolation)
    pre = checkpoint.preprocessing
    pre = None if pre is None else fitted(pre, size)
    return replace(checkpoint, architecture=new, tensors=tensors, preprocessing=pre)


def published_preprocessing(checkpoint: Checkpoint, published: Published) -> Preprocessing | None:
    """What was published beside a file that cannot say it itself."""
    pre = checkpoint.preprocessing
    if pre is None or not published.crop:
        return pre
    short = round(published.size / published.crop)
    return replace(pre, short_side=short, interpolation=published.interpolation)


def fitted(preprocessing: Preprocessing, size: Size) -> Preprocessing:
    """The same preprocessing for images of another size, cropped by the same fraction."""
    if preprocessing.size == size:
        return preprocessing
    short = round(preprocessing.short_side * min(size) / min(preprocessing.size))
    return replace(preprocessing, size=size, short_side=short)


def save(model: Classifier, path: str | Path, to: FormatName = "vitrail") -> None:
    """Write the model in a format; an architecture the format cannot hold is named in the error."""
    path = Path(path)
    model = getattr(model, "_orig_mod", model)  # what torch.compile was given
    if not isinstance(model, Classifier) or any(x.is_meta for x in model.parameters()):
        raise VitrailError(f"cannot save {type(model).__name__}: expected a model with weights")
    if model.preprocess is not None and not isinstance(model.preprocess, Preprocessing):
        raise VitrailError("cannot save a preprocess that is not vitrail's Preprocessing")
    # A folder's name may have a dot in it, and transformers' checkpoints are folders.
    named = to == "huggingface" and path.suffix not in CONTAINERS
    files.write(contents(model, path, to), folder=path.is_dir() or named)


def contents(model: Classifier, path: Path, to: FormatName) -> Contents:
    """What the file or folder of that format will hold."""
    tensors = {key: x.detach().cpu() for key, x in model.state_dict().items()}
    if to == "vitrail":
        if path.suffix not in (".safetensors", "") and not path.is_dir():
            raise VitrailError(
                f"Vitrail's own format is .safetensors or a folder, not '{path.name}'"
            )
        return Contents(path=path, tensors=tensors, metadata=native.header(model))
    if to not in FORMATS:
        raise VitrailError(f"unknown format '{to}'; expected one of {', '.join(FORMATS)}, vitrail")
    target = FORMATS[to]
    if (path.suffix == ".npz") != (to == "google"):
        raise VitrailError(f"{to} checkpoints are {target.suffix or 'folders'}, not '{path.name}'")
    if reason := target.refusal(model.architecture):
        raise VitrailError(f"cannot write {name(model.architecture)} for {to}: {reason}")
    architecture, tensors = target.adapt(model.architecture, tensors)
    matched = place(target, architecture, tensors)
    config, preprocessor = target.sidecars(model)
    found = Contents(
        path=path,
        tensors=target.spell(architecture, to_theirs(matched, tensors)),
        metadata={"format": "pt"},
        config=config,
        preprocessor=preprocessor,
    )
    if path.suffix in CONTAINERS - {".safetensors"} and not path.is_dir():
        refuse_unreadable(target, found, architecture)
    return found


def refuse_unreadable(target: Format, found: Contents, architecture: Architecture) -> None:
    """Stop where a file without a config would be read as another model."""
    bare = replace(found, config={}, tensors=target.normalise(found.tensors))
    seen = target.describe(bare, architecture.size)
    for what in ("heads", "pool", "size"):
        has, reads = getattr(architecture, what, None), getattr(seen, what, None)
        if has != reads:
            raise VitrailError(
                f"{found.path.name} would be read with {what} {reads} instead of {has}, since "
                f"such a file cannot say; write a .safetensors file or a folder"
            )
