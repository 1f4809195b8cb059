"""Masked patch prediction (appendix B.1.2): half of the patches are corrupted, and the model
predicts what was there.

Patches are corrupted after their projection and before positions are added, so the model knows
where something is missing. The loss is taken at every corrupted position, and only there.
"""

import math
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from vitrail.data.augment import normalize
from vitrail.data.draws import derive_seed, uniform
from vitrail.data.loader import TrainingBatch
from vitrail.devices import reshard
from vitrail.errors import VitrailError
from vitrail.model.classifier import eval_mode
from vitrail.model.vit import ViT, ViTArchitecture
from vitrail.training.inputs import NO_VAL_IMAGE, ImageInputs
from vitrail.training.objectives.base import Objective

Target = Literal["mean", "grid", "pixels"]

HIDDEN, SWAPPED = 0.8, 0.1
"""Shares of the corrupted patches that become the mask token, or another patch; the rest stays."""
LEVELS = 8
"""Three bits for each color."""
SIDE = 4
"""Cells along each side of a patch in the finer of the two color targets."""
_MASKING = -1
"""Sets the seeds of masks apart from those of augmentation and dropout."""


class MaskedPatches(Objective):
    """A ViT that predicts the patches that it cannot see.

    The target `mean` is the 3-bit mean color of a patch, one of 512; `grid` that of each of its
    4 × 4 cells; `pixels` its pixels, by squared error.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        model: nn.Module,
        *,
        target: Target = "mean",
        share: float = 0.5,
        inputs: ImageInputs | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(model, ViT):
            raise VitrailError(
                f"train.objective=masked hides patches of a ViT; {type(model).__name__} has none"
            )
        a = model.architecture
        mean = std = (0.5,) * a.channels
        if inputs is not None:
            mean, std = inputs.preprocessing.mean, inputs.preprocessing.std
        _check(a, target, len(mean))
        self.model, self.target, self.share, self.inputs = model, target, share, inputs
        self.skipped = () if inputs is None else inputs.skipped
        self.patches = math.prod(a.grid)
        self.mask_token = nn.Parameter(torch.zeros(a.width))
        nn.init.normal_(self.mask_token, std=0.02)
        values = {
            "mean": LEVELS**a.channels,
            "grid": SIDE**2 * LEVELS**a.channels,
            "pixels": a.stride**2 * a.channels,
        }
        self.head = nn.Linear(a.width, values[target])
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        for name, color in (("mean", mean), ("std", std)):
            self.register_buffer(name, torch.tensor(color)[:, None, None], persistent=False)
        if model.pool is not None:
            model.pool.requires_grad_(False)  # nothing is pooled here

    def forward(
        self, inputs: Float[Tensor, "b c y x"], noise: Float[Tensor, "b 3 n"] | None = None
    ) -> Float[Tensor, " b"]:
        """The loss of each image; `noise` from `draw` decides what is masked, and how.

        Without it, masks are drawn from torch's global generator.
        """
        a = self.model.architecture
        if noise is None:
            noise = torch.rand(len(inputs), 3, self.patches, device=inputs.device)
        chosen = choose(noise[:, 0], self.share)
        tokens = self.model.tokens(
            inputs, partial(corrupt, chosen=chosen, mask=self.mask_token, noise=noise)
        )[:, a.prefix :]
        if a.norm_after_pool:
            tokens = self.model.norm(tokens)  # which has not happened yet
        predicted = self.head(_rows(tokens, chosen)).float()
        truth = _rows(self.truth(inputs), chosen)
        if self.target == "pixels":
            return (predicted - truth).square().mean((1, 2))
        predicted = rearrange(predicted, "b m (k v) -> b v m k", v=LEVELS ** inputs.shape[1])
        return F.cross_entropy(predicted, truth, reduction="none").mean((1, 2))

    def prepare(self, batch: TrainingBatch, rows: slice) -> tuple[Float[Tensor, "r ..."], Tensor]:
        """Normalized pixels, and the noise that decides which patches are masked."""
        images = normalize(batch.images[rows], self.inputs.preprocessing)
        first, last = batch.first + rows.start, batch.first + rows.stop
        positions = torch.arange(first, last, device=images.device)
        seed = derive_seed(self.inputs.config.seed, _MASKING)
        return images, draw(seed, positions, self.patches)

    def validate(self) -> dict[str, Any]:
        """The loss on val; without labels there is no accuracy."""
        devices, images = self.inputs.devices, self.inputs.val
        losses = [torch.zeros(0, device=devices.device)]
        with eval_mode(self), torch.no_grad(), devices.autocast():
            for part in images:
                indices = part.indices if len(part.indices) else torch.tensor([0])
                # The same patches in every evaluation.
                noise = draw(0, indices.to(devices.device, non_blocking=True), self.patches)
                loss = self(part.pixels.to(devices.device, non_blocking=True), noise)
                losses.append(loss[: len(part.indices)])
        reshard(self)
        found = torch.cat(losses).cpu().double()
        sums = torch.tensor([found.sum().item(), len(found)], dtype=torch.float64)
        total, n = devices.total(sums).tolist()
        if not n:
            raise VitrailError(NO_VAL_IMAGE)
        names = images.source.names
        skipped = [(names[index], reason) for index, reason in images.skipped]
        return {"loss": total / n, "n": int(n), "skipped": skipped}

    @property
    def compiled(self) -> nn.Module:
        return self

    @torch.no_grad()
    def truth(self, inputs: Float[Tensor, "b c y x"]) -> Tensor:
        """The target of every patch, corrupted or not."""
        a = self.model.architecture
        p = a.stride
        rows, columns = inputs.shape[2] // p * p, inputs.shape[3] // p * p
        images = inputs[:, :, :rows, :columns].float()
        if self.target == "pixels":
            return rearrange(images, "b c (y p) (x q) -> b (y x) (p q c)", p=p, q=p)
        cells = 1 if self.target == "mean" else SIDE
        colors = F.avg_pool2d(images, p // cells) * self.std + self.mean
        levels = (colors * LEVELS).floor().clamp(0, LEVELS - 1).long()
        # Red counts 64, green 8, blue 1.
        weights = LEVELS ** torch.arange(a.channels - 1, -1, -1, device=inputs.device)
        numbers = (levels * weights[:, None, None]).sum(1)
        return rearrange(numbers, "b (y k) (x l) -> b (y x) (k l)", k=cells, l=cells)


def _check(a: ViTArchitecture, target: Target, channels: int) -> None:
    if target == "grid" and a.stride % SIDE:
        raise VitrailError(f"patches of {a.stride} pixels do not divide into 4 × 4 cells")
    if a.grid != tuple(side // a.stride for side in a.size):
        raise VitrailError(
            f"{a.size[0]} × {a.size[1]} pixels are not a whole number of patches of {a.stride}; "
            "train.objective=masked needs another data.size"
        )
    if channels != a.channels:
        raise VitrailError(
            f"the model takes {a.channels} channels, its preprocessing gives {channels}"
        )


def draw(seed: int, positions: Int[Tensor, " b"], patches: int) -> Float[Tensor, "b 3 n"]:
    """Noise for each image: which patches are corrupted, how, and what replaces them."""
    return uniform(seed, positions, 3 * patches).unflatten(1, (3, patches))


def choose(noise: Float[Tensor, "b n"], share: float) -> Int[Tensor, "b m"]:
    """The patches of each image to corrupt: always the same number, at least one."""
    patches = noise.shape[1]
    count = min(max(1, round(share * patches)), patches)
    return noise.argsort(1)[:, :count]


def corrupt(
    patches: Float[Tensor, "b n d"],
    chosen: Int[Tensor, "b m"],
    mask: Float[Tensor, " d"],
    noise: Float[Tensor, "b 3 n"],
) -> Float[Tensor, "b n d"]:
    """The chosen patches hidden, swapped for another one of the same image, or left as they are."""
    n, m = patches.shape[1], chosen.shape[1]
    chance = noise[:, 1, :m]
    step = 1 + (noise[:, 2, :m] * (n - 1)).long()
    own, other = _rows(patches, chosen), _rows(patches, (chosen + step) % n)
    hidden: Bool[Tensor, "b m 1"] = (chance < HIDDEN)[..., None]
    swapped: Bool[Tensor, "b m 1"] = ((chance >= HIDDEN) & (chance < HIDDEN + SWAPPED))[..., None]
    new = torch.where(hidden, mask.to(own), torch.where(swapped, other, own))
    return patches.scatter(1, chosen[..., None].expand_as(new), new)


def _rows(x: Tensor, chosen: Int[Tensor, "b m"]) -> Tensor:
    """The chosen rows of each image."""
    return x.gather(1, chosen[..., None].expand(-1, -1, x.shape[-1]))
