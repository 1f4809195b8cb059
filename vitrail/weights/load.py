"""`load` and `save`: a model from any known checkpoint, and any known checkpoint from a model."""

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, reduce
from pathlib import Path
from typing import Any, Literal

import torch

from vitrail.console import say
from vitrail.data.dataset import imagenet_classes
from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import VitrailError, did_you_mean
from vitrail.model import Architecture, Classifier, build_meta, parse_variant
from vitrail.model.classifier import Activation, as_size
from vitrail.model.positions import Interpolation, resize_grid, resize_line
from vitrail.model.variants import variant_name
from vitrail.model.vit import ViTArchitecture
from vitrail.weights import native
from vitrail.weights.google import GOOGLE
from vitrail.weights.hub import fetch
from vitrail.weights.huggingface import HUGGINGFACE
from vitrail.weights.layout import (
    Format,
    Size,
    Tensors,
    Unstated,
    WeightEntry,
    match,
    to_ours,
    to_theirs,
)
from vitrail.weights.published import BUILTIN, NAMES, Published
from vitrail.weights.read import Contents, parsing, read, write
from vitrail.weights.timm import TIMM
from vitrail.weights.torchvision import TORCHVISION

FORMATS: dict[str, Format] = {
    known.name: known for known in (GOOGLE, TIMM, HUGGINGFACE, TORCHVISION)
}
Gelu = Literal["tanh", "erf"]
EXPORTED = (".onnx", ".pt2")
"""The files of `vitrail export`, which `vitrail.weights.exported` opens."""
FormatName = Literal["google", "timm", "huggingface", "torchvision", "vitrail"]

_POSITIONS = r"^positions\.\d+\.(table|rows|columns)$|\.relative\.table$|\.offsets$"
_CONTAINERS = {".npz", ".safetensors", ".pt", ".pth", ".bin"}
# Fields of an architecture that change no tensor.
_OPTIONS = {"dropout", "embedding_dropout", "drop_path", "interpolation", "gelu", "eps"}


def _check_shapes(path: Path, tensors: Tensors, expected: Tensors) -> None:
    """Raise an error that names every tensor that is missing, unexpected or misshapen."""
    has, wanted = _signatures(tensors), _signatures(expected)
    problems = {
        "missing": [key for key in wanted if key not in has],
        "unexpected": [key for key in has if key not in wanted],
        "misshapen": [
            f"{key} {has[key]} instead of {wanted[key]}"
            for key in wanted
            if key in has and has[key] != wanted[key]
        ],
    }
    lines = [f"{len(keys)} {kind}: {', '.join(keys)}" for kind, keys in problems.items() if keys]
    if lines:
        raise VitrailError(f"{path} does not fit its architecture; {'; '.join(lines)}")


def _signatures(tensors: Tensors) -> dict[str, str]:
    """The shape of each tensor, and whether it holds integers."""
    return {
        key: f"{tuple(x.shape)}{'' if x.is_floating_point() else ' of integers'}"
        for key, x in tensors.items()
    }


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint under our names."""

    path: Path
    format: str
    architecture: Architecture
    tensors: Tensors
    labels: tuple[str, ...] = ()
    preprocessing: Preprocessing | None = None
    activation: Activation = "softmax"
    assumed: str = ""
    """One line about what the file does not state, and what was assumed."""
    training_data: Mapping[str, Any] = field(default_factory=dict)
    training_cost: Mapping[str, float] | None = None


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
    one named. `heads` and `gelu` are for files that do not state them. `options` change no tensor:
    dropout, embedding_dropout, drop_path, gelu, eps.
    """
    stated = {"heads": options.pop("heads", None), "gelu": options.get("gelu")}
    checkpoint = open_checkpoint(source, size, interpolation, **stated)
    if options:
        checkpoint = _with_options(checkpoint, options)
    model = to_model(checkpoint)
    if classes is not None and classes != checkpoint.architecture.classes:
        model.replace_head(classes)
    return model


def open_checkpoint(
    source: str | Path,
    size: int | Size | None = None,
    interpolation: Interpolation | None = None,
    *,
    heads: int | None = None,
    gelu: Gelu | None = None,
) -> Checkpoint:
    """A MODEL under our names, with positions for images of `size`.

    A line on stderr says what had to be assumed.
    """
    path, published = resolve(source)
    if path.suffix in EXPORTED and not path.is_dir():
        raise VitrailError(
            f"{path} is an exported file, which only predict and serve take; name the model that "
            "it was exported from"
        )
    if published is not None:
        size = published.size if size is None else size
        heads = heads or getattr(
            parse_variant(published.variant, **published.options), "heads", None
        )
    size = None if size is None else as_size(size)
    checkpoint = read_checkpoint(path, size, heads=heads, gelu=gelu)
    if checkpoint.assumed:
        _say_once(checkpoint.assumed)
    pre = checkpoint.preprocessing
    if published is not None and published.crop and pre is not None:
        # The file itself does not state it.
        short = round(published.size / published.crop)
        pre = replace(pre, short_side=short, interpolation=published.interpolation)
        checkpoint = replace(checkpoint, preprocessing=pre)
    if interpolation is not None:
        checkpoint = _with_options(checkpoint, {"interpolation": interpolation})
    return checkpoint if size is None else _resized(checkpoint, size)


def resolve(source: str | Path) -> tuple[Path, Published | None]:
    """The path of a MODEL: a path, or that of a published name or an address once downloaded.

    A folder comes before a published name, except for `builtin`: `./builtin` is the folder.
    """
    path = Path(source)
    if isinstance(source, Path) or (os.path.lexists(path) and source != BUILTIN.name):
        return path, None
    if published := NAMES.get(source):
        return fetch(published.source), published
    if source.startswith(("hub:", "https://", "http://")):
        return fetch(source), None
    hint = did_you_mean(source, list(NAMES)) or "; `vitrail models` lists the names"
    raise VitrailError(f"'{source}' is neither a file nor a published name{hint}")


def to_model(checkpoint: Checkpoint) -> Classifier:
    """The model; its tensors are the checkpoint's own."""
    model = build_meta(checkpoint.architecture)
    tensors = checkpoint.tensors
    # A layer cannot compute with two precisions: the widest of them is used.
    precisions = {x.dtype for x in tensors.values() if x.is_floating_point()}
    if len(precisions) > 1:
        widest = reduce(torch.promote_types, precisions)
        tensors = {k: x.to(widest) if x.is_floating_point() else x for k, x in tensors.items()}
    model.load_state_dict({key: x.contiguous() for key, x in tensors.items()}, assign=True)
    model.origin, model.file = checkpoint.format, checkpoint.path
    model.labels, model.training_data = checkpoint.labels, checkpoint.training_data
    model.preprocess, model.activation = checkpoint.preprocessing, checkpoint.activation
    model.training_cost = checkpoint.training_cost
    return model.eval()


def _with_options(checkpoint: Checkpoint, options: dict[str, Any]) -> Checkpoint:
    architecture = checkpoint.architecture
    if not isinstance(architecture, ViTArchitecture):
        raise VitrailError(f"{variant_name(architecture)} takes no {', '.join(options)}")
    if wrong := set(options) - _OPTIONS:
        raise VitrailError(f"cannot change {', '.join(sorted(wrong))} of trained weights")
    return replace(checkpoint, architecture=replace(architecture, **options))


def _resized(checkpoint: Checkpoint, size: Size) -> Checkpoint:
    """The checkpoint for images of another size; class slots stay as they are."""
    old = checkpoint.architecture
    if size == old.size:
        return checkpoint
    new = replace(old, size=size)
    wanted = _shapes(new)
    tensors = dict(checkpoint.tensors)
    for key, table in tensors.items():
        if not re.search(_POSITIONS, key):
            continue
        if table.ndim == 2:  # rows, columns, offsets: one axis each
            tensors[key] = resize_line(table, wanted[key].shape[0])
        elif isinstance(old, ViTArchitecture) and isinstance(new, ViTArchitecture):
            tensors[key] = resize_grid(table, old.grid, new.grid, old.interpolation)
    pre = checkpoint.preprocessing
    pre = None if pre is None else fitted(pre, size)
    return replace(checkpoint, architecture=new, tensors=tensors, preprocessing=pre)


def fitted(preprocessing: Preprocessing, size: Size) -> Preprocessing:
    """The same preprocessing for images of another size, cropped by the same fraction."""
    if preprocessing.size == size:
        return preprocessing
    short = round(preprocessing.short_side * min(size) / min(preprocessing.size))
    return replace(preprocessing, size=size, short_side=short)


def read_checkpoint(
    path: Path,
    requested: Size | None = None,
    known_size: Size | None = None,
    *,
    heads: int | None = None,
    gelu: Gelu | None = None,
) -> Checkpoint:
    """Recognize a checkpoint and translate it.

    `requested` is the size the user wants. `known_size`, the size of the images the file is for,
    `heads` and `gelu` are what the file may not state but the caller knows.
    """
    contents = replace(read(path), size=known_size, heads=heads, gelu=gelu)
    if native.recognize(contents):
        stored = native.describe(contents)
        _check_heads(contents, stored["architecture"])
        _check_shapes(path, contents.tensors, _shapes(stored["architecture"]))
        return Checkpoint(path=path, format="vitrail", tensors=contents.tensors, **stored)
    for known in FORMATS.values():
        if known.recognize(contents):
            return _translate(known, contents, requested)
    shown = ", ".join(list(contents.tensors)[:3]) or "nothing"
    raise VitrailError(
        f"{path} is not a checkpoint of a known architecture (it holds {shown} …); "
        f"known formats are {', '.join(FORMATS)} and vitrail"
    )


def _translate(known: Format, contents: Contents, requested: Size | None) -> Checkpoint:
    # Tensors and config.json may hold anything: any exception becomes one line about this file.
    with parsing(contents.path, f"{known.name} checkpoint"):
        if family := known.unsupported(contents):
            raise VitrailError(f"{contents.path} is {family}, which Vitrail does not support")
        unstated = known.unstated(contents)
        contents = replace(contents, tensors=known.normalize(contents.tensors))
        architecture = known.describe(contents, requested)
        _check_heads(contents, architecture)
        if isinstance(architecture, ViTArchitecture):
            stated: dict[str, Any] = {"interpolation": known.interpolation}
            stated |= known.exceptions(contents)
            stated |= {"gelu": contents.gelu} if contents.gelu else {}
            architecture = replace(known.numerics(architecture), **stated)
        labels = known.labels(contents)
        preprocessing = known.preprocessing(contents, architecture)
    wanted = _shapes(architecture)
    matched = _match_table(known, architecture, wanted)
    _check_shapes(contents.path, contents.tensors, to_theirs(matched, wanted))
    if not labels and architecture.classes == 1000:
        # Nobody else publishes files of exactly a thousand classes without their names.
        labels = imagenet_classes()
    return Checkpoint(
        path=contents.path,
        format=known.name,
        architecture=architecture,
        tensors=to_ours(matched, contents.tensors),
        labels=labels if len(labels) == architecture.classes else (),
        preprocessing=preprocessing,
        assumed=_assumption(contents, architecture, unstated),
    )


def _check_heads(contents: Contents, architecture: Architecture) -> None:
    """Stop if the user gives another number of heads than the file itself has."""
    heads = getattr(architecture, "heads", None)
    if contents.heads not in (None, heads):
        has = (
            f"has {heads} heads"
            if heads
            else f"is a {variant_name(architecture)}, which has no heads"
        )
        raise VitrailError(f"{contents.path} {has}; remove heads={contents.heads}")


@cache
def _say_once(line: str) -> None:
    """A sweep loads the same file many times."""
    say(line)


def _assumption(contents: Contents, a: Architecture, unstated: Collection[Unstated]) -> str:
    """One line about what a file does not state and what is assumed; empty if it states all."""
    heads, width = getattr(a, "heads", 1), getattr(a, "width", 1)
    words: dict[Unstated, str] = {
        "heads": "" if contents.heads else f"{heads} heads of {width // heads}",
        "gelu": "" if contents.gelu else f"the {getattr(a, 'gelu', '')} GELU",
        "pool": f"{'class-token' if getattr(a, 'pool', '') == 'class' else 'mean'} pooling",
        "rotary": "no rotary positions, as DeiT-III and unlike timm's rope models",
        "antialiasing": f"torchvision's {variant_name(a)}, not timm's resnetaa or resnetblur",
    }
    assumed = {what: words[what] for what in unstated if words[what]}
    if not assumed:
        return ""
    line = (
        f"{contents.path} does not fully describe its model: assuming {', '.join(assumed.values())}"
    )
    options = [what for what in ("heads", "gelu") if what in assumed]
    if not options:
        return line
    flags = " and ".join(f"--{option}" for option in options)
    return f"{line}; if that is wrong, state it with `vitrail convert` and {flags}"


def _match_table(known: Format, architecture: Architecture, tensors: Tensors) -> list[WeightEntry]:
    """The format's entry for each of our tensors; an error names those that have none."""
    matched, unmatched = match(known.table(architecture), tensors)
    if unmatched:
        raise VitrailError(f"{known.name} has no name for {', '.join(unmatched)}")
    return matched


def _shapes(architecture: Architecture) -> Tensors:
    """Every tensor of the architecture, on the meta device."""
    return build_meta(architecture).state_dict()


def save(model: Classifier, path: str | Path, to: FormatName = "vitrail") -> None:
    """Write the model in a format; an error says what the format cannot hold."""
    path = Path(path)
    model = getattr(model, "_orig_mod", model)  # what torch.compile was given
    if not isinstance(model, Classifier) or any(x.is_meta for x in model.parameters()):
        raise VitrailError(f"cannot save {type(model).__name__}: expected a model with weights")
    if model.preprocess is not None and not isinstance(model.preprocess, Preprocessing):
        raise VitrailError("cannot save a preprocess that is not vitrail's Preprocessing")
    # A folder's name may have a dot in it, and transformers' checkpoints are folders.
    named = to == "huggingface" and path.suffix not in _CONTAINERS
    write(to_contents(model, path, to), folder=path.is_dir() or named)


def to_contents(model: Classifier, path: Path, to: FormatName) -> Contents:
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
        raise VitrailError(f"cannot write {variant_name(model.architecture)} for {to}: {reason}")
    architecture, tensors = target.adapt(model.architecture, tensors)
    matched = _match_table(target, architecture, tensors)
    config, preprocessor = target.sidecars(model)
    contents = Contents(
        path=path,
        tensors=target.file_names(architecture, to_theirs(matched, tensors)),
        metadata={"format": "pt"},
        config=config,
        preprocessor=preprocessor,
    )
    if path.suffix in _CONTAINERS - {".safetensors"} and not path.is_dir():
        same = model.origin == target.name
        _refuse_ambiguous(target, contents, architecture if same else target.numerics(architecture))
    return contents


def _refuse_ambiguous(target: Format, contents: Contents, architecture: Architecture) -> None:
    """Stop if a file without a config would be read as another model."""
    bare = replace(contents, config={}, tensors=target.normalize(contents.tensors))
    seen = target.describe(bare, architecture.size)
    if isinstance(seen, ViTArchitecture):
        seen = replace(target.numerics(seen), **target.exceptions(bare))
    for what in ("heads", "pool", "size", "gelu", "eps"):
        has, reads = getattr(architecture, what, None), getattr(seen, what, None)
        if has != reads:
            raise VitrailError(
                f"{contents.path.name} would be read with {what} {reads} instead of {has}, "
                f"because this file type cannot store it; write a .safetensors file or a folder"
            )
