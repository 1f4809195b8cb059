"""`load` and `save`: a model from any known checkpoint, and any known checkpoint from a model."""

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torchvision.models import ResNet50_Weights

from vitrail.console import say
from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import VitrailError, did_you_mean
from vitrail.model import Architecture, Classifier, build, describe
from vitrail.model.checks import as_size
from vitrail.model.classifier import Activation
from vitrail.model.positions import Interpolation, resize_grid, resize_line
from vitrail.model.variants import name
from vitrail.model.vit import ViTArchitecture
from vitrail.weights import files, native
from vitrail.weights.download import fetch
from vitrail.weights.files import Contents
from vitrail.weights.format import Format, Size, Tensors, Unstated
from vitrail.weights.google import GOOGLE
from vitrail.weights.huggingface import HUGGINGFACE
from vitrail.weights.layout import Entry, match, to_ours, to_theirs
from vitrail.weights.published import BUILTIN, NAMES, Published, find
from vitrail.weights.timm import TIMM
from vitrail.weights.torchvision import TORCHVISION

FORMATS = {known.name: known for known in (GOOGLE, TIMM, HUGGINGFACE, TORCHVISION)}
POSITIONS = r"^positions\.\d+\.(table|rows|columns)$|\.relative\.table$|\.offsets$"
CONTAINERS = {".npz", ".safetensors", ".pt", ".pth", ".bin"}
Gelu = Literal["tanh", "erf"]
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
    activation: Activation = "softmax"
    assumed: str = ""
    """One line about what the file leaves open, and how it was read."""
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
    one named. `heads` and `gelu` are for files that do not say them. `options` change no tensor:
    dropout, embedding_dropout, drop_path, gelu, eps.
    """
    stated = {"heads": options.pop("heads", None), "gelu": options.get("gelu")}
    checkpoint = open_checkpoint(source, size, interpolation, **stated)
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
    *,
    heads: int | None = None,
    gelu: Gelu | None = None,
) -> Checkpoint:
    """A MODEL in our terms, its positions for images of `size`; what it leaves open is assumed, in
    one line to stderr."""
    path, published = resolve(source)
    if published is not None:
        size = published.size if size is None else size
        heads = heads or getattr(describe(published.variant, **published.options), "heads", None)
    size = None if size is None else as_size(size)
    checkpoint = read(path, size, heads=heads, gelu=gelu)
    if checkpoint.assumed:
        say(checkpoint.assumed)
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
    model.origin, model.file = checkpoint.format, checkpoint.path
    model.labels, model.learnt_from = checkpoint.labels, checkpoint.learnt_from
    model.preprocess, model.activation = checkpoint.preprocessing, checkpoint.activation
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


def read(
    path: Path,
    wish: Size | None = None,
    known_size: Size | None = None,
    *,
    heads: int | None = None,
    gelu: Gelu | None = None,
) -> Checkpoint:
    """Recognise a checkpoint and put it into our terms.

    `wish` is the size the user wants; `known_size` that of the images the file is for, `heads` and
    `gelu` what it cannot say itself, where the caller knows them.
    """
    contents = replace(files.read(path), size=known_size, heads=heads, gelu=gelu)
    if native.recognise(contents):
        told = native.describe(contents)
        refuse_other_heads(contents, told.architecture)
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
        if family := known.stranger(contents):
            raise VitrailError(f"{contents.path} is {family}, which Vitrail does not have")
        unstated = known.unstated(contents)
        contents = replace(contents, tensors=known.normalise(contents.tensors))
        architecture = known.describe(contents, wish)
        refuse_other_heads(contents, architecture)
        if isinstance(architecture, ViTArchitecture):
            told: dict[str, Any] = {"interpolation": known.interpolation}
            told |= known.exceptions(contents)
            told |= {"gelu": contents.gelu} if contents.gelu else {}
            architecture = replace(known.numerics(architecture), **told)
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
        assumed=assumption(contents, architecture, unstated),
    )


def refuse_other_heads(contents: Contents, architecture: Architecture) -> None:
    """Stop where the user names another number of heads than the file itself has."""
    heads = getattr(architecture, "heads", None)
    if contents.heads not in (None, heads):
        has = f"says it has {heads}" if heads else f"is a {name(architecture)}, which has none"
        raise VitrailError(f"{contents.path} {has}; heads = {contents.heads} cannot be")


def assumption(contents: Contents, a: Architecture, unstated: Collection[Unstated]) -> str:
    """One line about what a file leaves open and how it is read; empty where it says everything."""
    heads, width = getattr(a, "heads", 1), getattr(a, "width", 1)
    words: dict[Unstated, str] = {
        "heads": "" if contents.heads else f"{heads} heads of {width // heads}",
        "gelu": "" if contents.gelu else f"the {getattr(a, 'gelu', '')} GELU",
        "pool": f"{'class-token' if getattr(a, 'pool', '') == 'class' else 'mean'} pooling",
        "rotary": "no rotary positions, as DeiT-III and unlike timm's rope models",
        "antialiasing": f"torchvision's {name(a)}, not timm's resnetaa or resnetblur",
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
    flags = ", ".join(f"--{option}" for option in options)
    return f"{line}; {'=…, '.join(options)}=… (convert: {flags}) would change that"


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
        kept = model.origin == target.name
        refuse_unreadable(target, found, architecture if kept else target.numerics(architecture))
    return found


def refuse_unreadable(target: Format, found: Contents, architecture: Architecture) -> None:
    """Stop where a file without a config would be read as another model."""
    bare = replace(found, config={}, tensors=target.normalise(found.tensors))
    seen = target.describe(bare, architecture.size)
    if isinstance(seen, ViTArchitecture):
        seen = replace(target.numerics(seen), **target.exceptions(bare))
    for what in ("heads", "pool", "size", "gelu", "eps"):
        has, reads = getattr(architecture, what, None), getattr(seen, what, None)
        if has != reads:
            raise VitrailError(
                f"{found.path.name} would be read with {what} {reads} instead of {has}, since "
                f"such a file cannot say; write a .safetensors file or a folder"
            )
