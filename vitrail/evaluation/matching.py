"""Do the model and the data speak of the same classes?"""

from collections.abc import Collection, Sequence

from vitrail.data.dataset import Renamed, Source
from vitrail.errors import VitrailError
from vitrail.evaluation.imagenet import CLASSES, class_places

ADVICE = "train a new head first, with model.init=MODEL"


def class_order(
    known: Sequence[str], labels: Sequence[str], data: str = "the data set"
) -> list[int] | None:
    """Where each of the data's classes stands among the model's; None where they stand alike, or
    where the model does not name its classes."""
    if not known or tuple(known) == tuple(labels):
        return None
    places = {name: place for place, name in enumerate(known)}
    if len(places) == len(known) == len(labels) and set(places) == set(labels):
        return [places[name] for name in labels]
    missing, others = set(labels) - set(known), set(known) - set(labels)
    if missing:
        reason = f"{few(missing)} unknown to the model"
    elif others:
        reason = f"{few(others)} not in {data}"
    else:
        reason = "classes share a name, and stand in another order"
    counts = f"this model knows {len(known)} classes, {data} has {len(labels)}"
    raise VitrailError(f"{counts} ({reason}); {advice(len(known), labels)}")


def advice(known: int, labels: Sequence[str]) -> str:
    """What to do about a model of so many other classes."""
    if known == CLASSES and class_places(labels) is not None:
        return "if these folders are ImageNet's classes, evaluate with --labels imagenet"
    return ADVICE


def among_classes(source: Source, known: Sequence[str]) -> tuple[Source, tuple[str, ...]]:
    """Data that has only some of a model's classes, with all of them, and those that are absent."""
    places = {name: place for place, name in enumerate(known)}
    if len(places) < len(known) or not set(source.labels) < set(known):
        return source, ()
    numbers = tuple(places[name] for name in source.labels)
    absent = tuple(name for name in known if name not in source.labels)
    return Renamed(source, tuple(known), numbers), absent


def few(names: Collection[str]) -> str:
    """Up to three names."""
    return ", ".join(f"'{name}'" for name in sorted(names)[:3]) + (", …" if len(names) > 3 else "")
