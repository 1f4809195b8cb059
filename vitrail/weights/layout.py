"""Two names for one tensor, and how its numbers are laid out under each.

A format is a table of entries. An entry says which of our keys become which of theirs; `#` in ours
stands for a number, which theirs repeats as `{0}` (the same), `{0:1}` (one more), `{0:01}` (one
more, two digits) or `{0:-1}` (one less). The one table serves reading and writing.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

Tensors = Sequence[Tensor]


@dataclass(frozen=True)
class Layout:
    """How their tensors become ours, and back; both are pure copies of numbers."""

    read: Callable[[Tensors], Tensors]
    write: Callable[[Tensors], Tensors]


class Entry(NamedTuple):
    """Our key or keys, their key or keys, and the layout between them."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    layout: Layout


class Index(int):
    """A number in a key, as a template wants it written."""

    def __format__(self, spec: str) -> str:
        shown = {"": self, "1": self + 1, "-1": self - 1, "01": self + 1}[spec]
        return f"{int(shown):02d}" if spec == "01" else str(int(shown))


def one(read: Callable[[Tensor], Tensor], write: Callable[[Tensor], Tensor]) -> Layout:
    """A layout between one tensor and one tensor."""
    return Layout(lambda t: [read(t[0])], lambda t: [write(t[0])])


SAME = Layout(lambda t: t, lambda t: t)
DENSE = one(lambda t: t.mT, lambda t: t.mT)
CONV = one(lambda t: t.permute(3, 2, 0, 1), lambda t: t.permute(2, 3, 1, 0))
# Their head is a 1×1 convolution, ours a linear layer.
POINTWISE = one(lambda t: t[:, :, 0, 0], lambda t: t[:, :, None, None])
POINTWISE_CONV = one(lambda t: t[0, 0].mT, lambda t: t.mT[None, None])
# Their table holds the class token's position as its first row.
SLOT = Layout(
    lambda t: [t[0][:, :1], t[0][:, 1:]],
    lambda t: [torch.cat(list(t), 1)],
)


def stacked(parts: int) -> Layout:
    """Several of their tensors are one of ours, one after the other: query, key, value."""
    return Layout(lambda t: [torch.cat(list(t))], lambda t: t[0].chunk(parts))


def projections(heads: int, parts: int) -> Layout:
    """JAX keeps query, key and value apart, (width, heads, head width) each."""
    return Layout(
        lambda t: [torch.cat([rearrange(x, "d h k -> (h k) d") for x in t])],
        lambda t: [rearrange(x, "(h k) d -> d h k", h=heads) for x in t[0].chunk(parts)],
    )


def projection_biases(heads: int, parts: int) -> Layout:
    """The same for the biases, (heads, head width) each."""
    return Layout(
        lambda t: [torch.cat([x.flatten() for x in t])],
        lambda t: [rearrange(x, "(h k) -> h k", h=heads) for x in t[0].chunk(parts)],
    )


def merged(heads: int) -> Layout:
    """JAX's output projection takes (heads, head width)."""
    return one(
        lambda t: rearrange(t, "h k d -> d (h k)"),
        lambda t: rearrange(t, "d (h k) -> h k d", h=heads),
    )


def entry(ours: str, theirs: str, layout: Layout = SAME) -> Entry:
    """One tensor to one tensor."""
    return Entry((ours,), (theirs,), layout)


def torch_module(ours: str, theirs: str) -> list[Entry]:
    """Weight and bias of a module that is the same in another torch format."""
    return [entry(f"{ours}.{name}", f"{theirs}.{name}") for name in ("weight", "bias")]


def match(table: Sequence[Entry], keys: Iterable[str]) -> tuple[list[Entry], list[str]]:
    """Entries with their numbers filled in for these keys; and the keys without an entry."""
    waiting = dict.fromkeys(keys)
    found: list[Entry] = []
    for template in table:
        pattern = re.escape(template.ours[0]).replace(r"\#", r"(\d+)")
        for key in list(waiting):
            if not (numbers := re.fullmatch(pattern, key)):
                continue
            filled = [Index(number) for number in numbers.groups()]
            ours = tuple(name.replace("#", "{}").format(*filled) for name in template.ours)
            if all(name in waiting for name in ours):
                theirs = tuple(name.format(*filled) for name in template.theirs)
                found.append(Entry(ours, theirs, template.layout))
                for name in ours:
                    del waiting[name]
    return found, list(waiting)


def to_ours(matched: Sequence[Entry], theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our state dict out of theirs."""
    ours: dict[str, Tensor] = {}
    for names, keys, layout in matched:
        ours |= zip(names, layout.read([theirs[key] for key in keys]), strict=True)
    return ours


def to_theirs(matched: Sequence[Entry], ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """Their state dict out of ours."""
    theirs: dict[str, Tensor] = {}
    for names, keys, layout in matched:
        theirs |= zip(keys, layout.write([ours[name] for name in names]), strict=True)
    return theirs
