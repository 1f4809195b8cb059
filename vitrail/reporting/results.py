"""What `evaluation/<split>.json` says, in known kinds."""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int

from vitrail.reporting.fields import Fields, as_number, read_object

Span = tuple[float, float]

# Only a picture may enter the page, whatever a file calls one.
PICTURE = re.compile(r"data:image/(jpeg|png|webp);base64,[A-Za-z0-9+/]+={0,2}")
MOST_PICTURE_BYTES = 60_000
MOST_HEAT_CLASSES = 50
HEADLINES = ("test", "val")


@dataclass(frozen=True, kw_only=True)
class ClassScore:
    """How one class fared."""

    name: str
    n: int
    precision: float
    recall: float
    f1: float
    interval: Span
    """Of the recall, 95 %."""


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """A picture the model got wrong."""

    name: str
    truth: str
    guess: str
    probability: float
    thumbnail: str
    """A data URI, or nothing."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A class taken for another, `n` times of the `of` pictures of the first."""

    truth: str
    guess: str
    n: int
    of: int
    thumbnails: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Bin:
    """Answers whose probability lies between `low` and `high`."""

    low: float
    high: float
    n: int
    confidence: float
    accuracy: float


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One model measured on one split."""

    split: str
    n: int
    scores: dict[str, float]
    """top1, top5, balanced_accuracy, macro_f1, ece, loss, seconds; NaN where absent."""
    intervals: dict[str, Span]
    per_class: tuple[ClassScore, ...]
    confusion: Int[np.ndarray, "k k"] | None
    confused: tuple[Pair, ...]
    calibration: tuple[Bin, ...]
    mistakes: tuple[Mistake, ...]
    broken: list[tuple[str, str]]

    @property
    def has_top5(self) -> bool:
        """Whether top-5 says anything: of five classes, it is always right."""
        return not 0 < len(self.per_class) <= 5


SCORES = ("top1", "top5", "balanced_accuracy", "macro_f1", "ece", "loss", "seconds")


def read_results(folder: Path) -> tuple[dict[str, Evaluation], list[str]]:
    """Every split that was measured, the one to lead with first, and what could not be read."""
    found, notes = {}, []
    for path in sorted(folder.glob("*.json")):
        values, wrong = read_object(path)
        if wrong:
            notes.append(f"evaluation/{path.name} {wrong}.")
        elif "top1" in values.values:  # other verbs leave their results here too
            found[path.stem] = evaluation(path.stem, values)
    lead = [split for split in HEADLINES if split in found]
    return {split: found[split] for split in (*lead, *sorted(found.keys() - set(lead)))}, notes


def evaluation(split: str, values: Fields) -> Evaluation:
    """What one file holds."""
    per_class = tuple(class_score(row) for row in values.rows("per_class"))
    mistakes = tuple(mistake(row) for row in values.rows("mistakes"))
    intervals = values.fields("intervals")
    return Evaluation(
        split=split,
        n=values.count("n"),
        scores={name: values.number(name) for name in SCORES},
        intervals={name: intervals.span(name) for name in SCORES},
        per_class=per_class,
        confusion=confusion(values, len(per_class)),
        confused=confused(values, per_class, mistakes),
        calibration=tuple(calibration(row) for row in values.rows("calibration")),
        mistakes=mistakes,
        broken=values.pairs("broken"),
    )


def class_score(row: Fields) -> ClassScore:
    """One line of the table by class; a class without pictures has no recall, rather than zero."""
    n = row.count("n")
    return ClassScore(
        name=row.text("name"),
        n=n,
        precision=row.number("precision"),
        recall=row.number("recall") if n else float("nan"),
        f1=row.number("f1") if n else float("nan"),
        interval=row.span("interval"),
    )


def mistake(row: Fields) -> Mistake:
    """One of the most confident mistakes."""
    thumbnail = row.text("thumbnail")
    if len(thumbnail) > MOST_PICTURE_BYTES or not PICTURE.fullmatch(thumbnail):
        thumbnail = ""
    return Mistake(
        name=row.text("name"),
        truth=row.text("truth"),
        guess=row.text("guess"),
        probability=row.number("probability"),
        thumbnail=thumbnail,
    )


def confusion(values: Fields, classes: int) -> Int[np.ndarray, "k k"] | None:
    """The counts, where there are few enough to show and as many rows and columns as classes."""
    rows = values.items("confusion")
    square = all(isinstance(row, list) and len(row) == classes for row in rows)
    if not 0 < classes <= MOST_HEAT_CLASSES or len(rows) != classes or not square:
        return None
    counts = np.array([[as_number(value) for value in row] for row in rows])
    return np.nan_to_num(counts).astype(np.int64)


def confused(
    values: Fields, per_class: tuple[ClassScore, ...], mistakes: tuple[Mistake, ...]
) -> tuple[Pair, ...]:
    """The most frequent pairs, each with examples; older files have those among the mistakes."""
    sizes = {score.name: score.n for score in per_class}
    pairs = []
    for row in values.rows("confused"):
        truth, guess = row.text("truth"), row.text("guess")
        examples = [mistake(one) for one in row.rows("examples")]
        among = [m for m in mistakes if (m.truth, m.guess) == (truth, guess)]
        shown = [one.thumbnail for one in examples or among]
        pairs.append(
            Pair(
                truth=truth,
                guess=guess,
                n=row.count("n"),
                of=sizes.get(truth, 0),
                thumbnails=tuple(filter(None, shown))[:2],
            )
        )
    return tuple(pairs)


def calibration(row: Fields) -> Bin:
    """One bin of the calibration diagram."""
    return Bin(
        low=row.number("low"),
        high=row.number("high"),
        n=row.count("n"),
        confidence=row.number("confidence"),
        accuracy=row.number("accuracy"),
    )
