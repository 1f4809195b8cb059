"""Matching the classes of a model with those of a dataset."""

from collections.abc import Sequence
from importlib import import_module

from vitrail.data.dataset import Renamed, Source, listed
from vitrail.errors import VitrailError

NEW_HEAD = "train a new head first, with model.init=MODEL"


def class_order(
    known: Sequence[str], labels: Sequence[str], data: str = "the dataset"
) -> list[int] | None:
    """The model's number for each class of the data; None where both have the same order, or where
    the model does not name its classes."""
    if not known or tuple(known) == tuple(labels):
        return None
    numbers = {name: number for number, name in enumerate(known)}
    if len(numbers) == len(known) == len(labels) and set(numbers) == set(labels):
        return [numbers[name] for name in labels]
    missing, others = set(labels) - set(known), set(known) - set(labels)
    if missing:
        reason = f"{listed(sorted(missing), most=3)} unknown to the model"
    elif others:
        reason = f"{listed(sorted(others), most=3)} not in {data}"
    else:
        reason = "several classes share a name and the order differs"
    raise VitrailError(
        f"this model has {len(known)} classes, {data} has {len(labels)} ({reason}); "
        f"{other_classes_hint(len(known), labels)}"
    )


def other_classes_hint(known: int, labels: Sequence[str]) -> str:
    """What to do about a model with so many classes, none of them those of the data."""
    try:
        imagenet = import_module("vitrail.imagenet.classes")
    except ModuleNotFoundError:
        return NEW_HEAD
    if known == imagenet.CLASSES and imagenet.class_numbers(labels) is not None:
        return "if these folders are ImageNet classes, evaluate with --labels imagenet"
    return NEW_HEAD


def with_all_classes(source: Source, known: Sequence[str]) -> tuple[Source, tuple[str, ...]]:
    """Data with only some of a model's classes, renumbered to all of them, and those it lacks."""
    numbers = {name: number for number, name in enumerate(known)}
    if len(numbers) < len(known) or not set(source.labels) < set(known):
        return source, ()
    absent = tuple(name for name in known if name not in source.labels)
    return Renamed(source, tuple(known), tuple(numbers[name] for name in source.labels)), absent
