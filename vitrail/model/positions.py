"""The position embeddings of Table 8, and their interpolation to other grids.

No two libraries interpolate in the same way, so the method follows the checkpoint's family.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

Interpolation = Literal["google", "timm", "huggingface", "torchvision"]
Grid = tuple[int, int]

# google: scipy.ndimage.zoom(order=1), which is bilinear between the centers of the corner patches.
# timm: what it does with state dicts and at run time (its .npz loader is bilinear instead).
_METHODS: dict[Interpolation, dict[str, Any]] = {
    "google": {"mode": "bilinear", "align_corners": True},
    "timm": {"mode": "bicubic", "align_corners": False, "antialias": True},
    "huggingface": {"mode": "bicubic", "align_corners": False},
    "torchvision": {"mode": "bicubic", "align_corners": True},
}


def resize_grid(
    table: Float[Tensor, "1 n d"], old: Grid, new: Grid, method: Interpolation
) -> Float[Tensor, "1 m d"]:
    """A table for the grid `old`, row by row, interpolated to the grid `new`."""
    if old == new:
        return table
    grid = rearrange(table, "1 (y x) d -> 1 d y x", y=old[0])
    # float32 at least: bicubic weights in half precision would be noise.
    precise = torch.promote_types(grid.dtype, torch.float32)
    resized = F.interpolate(grid.to(precise), size=new, **_METHODS[method])
    return rearrange(resized.to(grid.dtype), "1 d y x -> 1 (y x) d")


def resize_line(table: Float[Tensor, "m d"], length: int) -> Float[Tensor, "l d"]:
    """A table over one axis, interpolated linearly end to end."""
    if table.shape[0] == length:
        return table
    line = F.interpolate(table.mT[None], size=length, mode="linear", align_corners=True)
    return line[0].mT


class Positions(nn.Module):
    """Adds position embeddings to a sequence of `prefix` leading tokens and a grid of patches.

    Of the leading tokens only the class token may have a position; registers never have one.
    """

    def __init__(self, grid: Grid, width: int, *, prefix: int, class_slot: bool) -> None:
        super().__init__()
        self.grid, self.prefix = grid, prefix
        self.class_slot = nn.Parameter(torch.zeros(1, 1, width)) if class_slot else None
        if self.class_slot is not None:
            nn.init.normal_(self.class_slot, std=0.02)

    def forward(self, x: Float[Tensor, "b n d"], grid: Grid) -> Float[Tensor, "b n d"]:
        patches = self.patches(x, grid)
        if not self.prefix:
            return x + patches
        slots: list[Tensor] = [] if self.class_slot is None else [self.class_slot]
        bare = self.prefix - len(slots)
        if bare:
            slots.append(patches.new_zeros(1, bare, patches.shape[-1]))
        return x + torch.cat([*slots, patches], 1)

    def patches(self, x: Float[Tensor, "b n d"], grid: Grid) -> Float[Tensor, "1 m d"]:
        """The embeddings of the patches, on the device of `x`."""
        raise NotImplementedError


class LearnedPositions(Positions):
    """One learned vector per patch, with no notion of rows and columns (the default)."""

    def __init__(
        self,
        grid: Grid,
        width: int,
        *,
        prefix: int,
        class_slot: bool,
        interpolation: Interpolation,
    ) -> None:
        super().__init__(grid, width, prefix=prefix, class_slot=class_slot)
        self.interpolation: Interpolation = interpolation
        self.table = nn.Parameter(torch.empty(1, grid[0] * grid[1], width))
        nn.init.normal_(self.table, std=0.02)

    def patches(self, x: Float[Tensor, "b n d"], grid: Grid) -> Float[Tensor, "1 m d"]:
        return resize_grid(self.table, self.grid, grid, self.interpolation)


class FactorizedPositions(Positions):
    """Learned 2-D: a vector of half the width per row, one per column, side by side."""

    def __init__(self, grid: Grid, width: int, *, prefix: int) -> None:
        super().__init__(grid, width, prefix=prefix, class_slot=False)
        self.rows = nn.Parameter(torch.empty(grid[0], width // 2))
        self.columns = nn.Parameter(torch.empty(grid[1], width // 2))
        nn.init.normal_(self.rows, std=0.02)
        nn.init.normal_(self.columns, std=0.02)

    def patches(self, x: Float[Tensor, "b n d"], grid: Grid) -> Float[Tensor, "1 m d"]:
        rows = resize_line(self.rows, grid[0])[:, None].expand(*grid, -1)
        columns = resize_line(self.columns, grid[1])[None].expand(*grid, -1)
        return torch.cat([columns, rows], -1).flatten(0, 1)[None]


class SinCosPositions(Positions):
    """Fixed 2-D sines and cosines, as in "Better plain ViT baselines" (Beyer et al. 2022)."""

    def __init__(self, grid: Grid, width: int, *, prefix: int) -> None:
        super().__init__(grid, width, prefix=prefix, class_slot=False)

    def patches(self, x: Float[Tensor, "b n d"], grid: Grid) -> Float[Tensor, "1 m d"]:
        precise = torch.promote_types(x.dtype, torch.float32)
        return sincos(grid, x.shape[-1], x.device, precise).to(x.dtype)


def sincos(
    grid: Grid, width: int, device: torch.device, dtype: torch.dtype, temperature: float = 10_000.0
) -> Float[Tensor, "1 n d"]:
    """Sines and cosines of the column, then of the row, at width/4 frequencies."""
    quarter = width // 4
    steps = torch.arange(quarter, device=device, dtype=dtype) / (quarter - 1)
    frequency = temperature**-steps
    rows = torch.arange(grid[0], device=device, dtype=dtype)[:, None, None] * frequency
    columns = torch.arange(grid[1], device=device, dtype=dtype)[None, :, None] * frequency
    waves = [wave.expand(*grid, -1) for x in (columns, rows) for wave in (x.sin(), x.cos())]
    return torch.cat(waves, -1).flatten(0, 1)[None]


class RelativePositions(nn.Module):
    """The content query attends to embeddings of the offset between two tokens (appendix D.4).

    Offsets are taken along the sequence, with the class token at 0. An offset embedding has the
    width of a key, and each head reads its own slice of it.
    """

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.table = nn.Parameter(torch.empty(2 * tokens - 1, width))
        nn.init.normal_(self.table, std=0.02)

    def forward(self, q: Float[Tensor, "b h n k"]) -> Float[Tensor, "b h n n"]:
        """Logits to add to the scaled content logits."""
        _, h, n, k = q.shape
        table = resize_line(self.table, 2 * n - 1).unflatten(-1, (h, k)) / k**0.5
        by_offset = torch.einsum("bhnk,mhk->bhnm", q, F.pad(table.flip(0), (0, 0, 0, 0, 0, 1)))
        # Row i is the n logits from n - 1 - i on: a view of rows one shorter, where an index would
        # cost an atomic addition for each logit in the backward pass.
        flat = by_offset.flatten(-2)[..., n - 1 : n - 1 + n * (2 * n - 1)]
        return flat.unflatten(-1, (n, 2 * n - 1))[..., :n]
