"""Which pictures are learnt from, which are held out: by name alone, so the same everywhere.

A picture's name is hashed to a number from 0 to 1. The first stretch of that range is test, the
next is val, the rest is train; a picture stays where it is when others come or go, and test stays
what it is when val changes. A class of few pictures may have none in a stretch: then its nearest
one is taken.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float, Int

from vitrail.data.source import Data, Source, Subset
from vitrail.errors import VitrailError

How = Literal["hash", "stratified", "hash alone"]
"""`hash alone` is how versions split that let all images of a small class lie in one part."""
At = Float[np.ndarray, " n"]
"""Where between 0 and 1 the names of pictures fall."""
Chosen = dict[str, Bool[np.ndarray, " n"]]
"""Which pictures go to each part that is held out."""


def hold_out(data: Data, *, val: float, test: float, how: How) -> Data:
    """The data with a val and a test part; what it does not bring is taken out of train."""
    check_fractions(val, test, how)
    train = data.train
    fractions = {
        "test": test if data.test is None else 0.0,
        "val": val if data.val is None else 0.0,
    }
    if train is None or not any(fractions.values()):
        return data
    # Data that brings one part may have been split by these very numbers: take others then.
    salt = "" if data.val is None and data.test is None else "rest/"
    at = positions(f"{salt}{name}" for name in train.names)
    chosen = WAYS[how](at, train.targets, fractions["test"], fractions["val"])
    rest = ~(chosen["test"] | chosen["val"])
    for part, pictures in chosen.items():
        if fractions[part] and not pictures.any():
            raise too_few(data.name, train, part, how)
    return replace(
        data,
        train=subset(train, rest),
        val=subset(train, chosen["val"]) if fractions["val"] else data.val,
        test=subset(train, chosen["test"]) if fractions["test"] else data.test,
    )


def by_hash(at: At, targets: Int[np.ndarray, " n"], test: float, val: float) -> Chosen:
    """Each image by itself, about `test` and `val` of each class; but a class that would have none
    in test gives the nearest, then in val, and always keeps one to learn from."""
    counts = np.bincount(targets)
    ends = (test, test + val)
    tests, both = (np.bincount(targets[at < end], minlength=len(counts)) for end in ends)
    # One is left for val whatever `val` is, on which test must not depend.
    tests = np.clip(tests, int(test > 0), np.maximum(counts - 2, 1))
    return lowest(at, targets, tests, np.maximum(both, tests + 1) if val else tests)


def by_hash_alone(at: At, targets: Int[np.ndarray, " n"], test: float, val: float) -> Chosen:
    """Each image by itself, whatever that leaves of a class."""
    return {"test": at < test, "val": (at >= test) & (at < test + val)}


def exactly(at: At, targets: Int[np.ndarray, " n"], test: float, val: float) -> Chosen:
    """Within each class the nearest whole numbers, and at least one picture left to learn from."""
    counts = np.bincount(targets)
    tests = np.round(counts * test).astype(int)
    return lowest(at, targets, tests, tests + np.round(counts * val).astype(int))


def lowest(
    at: At,
    targets: Int[np.ndarray, " n"],
    tests: Int[np.ndarray, " classes"],
    both: Int[np.ndarray, " classes"],
) -> Chosen:
    """Of each class the lowest, up to a number, are test, then up to another val; never all."""
    counts = np.bincount(targets)
    order = np.lexsort((at, targets))
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    spare = np.maximum(counts - 1, 0)
    is_test = rank < np.minimum(tests, spare)[targets]
    return {"test": is_test, "val": ~is_test & (rank < np.minimum(both, spare)[targets])}


WAYS = {"hash": by_hash, "stratified": exactly, "hash alone": by_hash_alone}


def random_subset(source: Source, size: int, seed: int) -> Subset:
    """So many pictures, drawn by the seed; a smaller draw is part of every larger one."""
    there = len(source.targets)
    if not 0 < size <= there:
        raise VitrailError(
            f"data.subset={size}: train has {there:,} pictures; choose from 1 to {there}"
        )
    at = positions(f"{seed}/{name}" for name in source.names)
    return Subset(source, np.sort(np.argsort(at, kind="stable")[:size]))


def positions(names: Iterable[str]) -> At:
    """Where each name falls: the first eight bytes of its SHA-256."""
    digests = b"".join(
        hashlib.sha256(name.encode("utf-8", "backslashreplace")).digest()[:8] for name in names
    )
    return np.frombuffer(digests, dtype=">u8") / 2.0**64


def subset(source: Source, chosen: Bool[np.ndarray, " n"]) -> Subset:
    """The chosen pictures, in the source's order."""
    indices: Int[np.ndarray, " m"] = np.flatnonzero(chosen)
    return Subset(source, indices)


def check_fractions(val: float, test: float, how: str) -> None:
    """Fractions that leave something to learn from, and a way to split that exists."""
    if not (0 <= val < 1 and 0 <= test < 1 and val + test < 1):
        raise VitrailError(
            f"data.val={val:g} and data.test={test:g} leave nothing to train on; "
            "choose fractions of train that sum to less than 1"
        )
    if how not in WAYS:
        raise VitrailError(f"data.split={how}: expected hash or stratified")


def too_few(name: str, source: Source, part: str, how: How) -> VitrailError:
    """A part that was asked for came out empty."""
    n = len(source.targets)
    ways = ["more images of a class (three are enough for train, val and test)"]
    if how == "stratified":
        ways = ["data.split=hash", "more images", f"a larger data.{part}"]
    ways += [f"data.{part}=0 for none"]
    return VitrailError(
        f"{name} has too few images ({n}): none falls to {part}; use {', or '.join(ways)}"
    )
