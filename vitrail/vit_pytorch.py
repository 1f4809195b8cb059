"""vit-pytorch's constructor, for code written against it: change the import, keep the call.

    from vitrail.vit_pytorch import ViT

It builds the paper's block, not vit-pytorch's. That differs from it in four ways: norms around
the patch embedding, no biases in query, key and value, attention dropout, and class token and
positions drawn from a unit normal. `pool="mean"` averages the patch tokens and has no class token
(appendix D.3). As there, a head is `dim_head` wide, 64 unless said otherwise, whatever dim / heads
is, and the image must be a whole number of patches.
"""

from vitrail.errors import VitrailError
from vitrail.model.classifier import as_size, is_count
from vitrail.model.variants import token_defaults
from vitrail.model.vit import ViT as VisionTransformer
from vitrail.model.vit import ViTArchitecture, sides_of


class ViT(VisionTransformer):
    """The paper's ViT from vit-pytorch's arguments."""

    def __init__(  # noqa: PLR0913
        self,
        *,
        image_size: int | tuple[int, int],
        patch_size: int | tuple[int, int],
        num_classes: int,
        dim: int,
        depth: int,
        heads: int,
        mlp_dim: int,
        pool: str = "cls",
        channels: int = 3,
        dim_head: int = 64,
        dropout: float = 0.0,
        emb_dropout: float = 0.0,
    ) -> None:
        if pool not in ("cls", "mean"):
            raise VitrailError(f"pool = '{pool}': expected 'cls' or 'mean'")
        if not is_count(dim_head) or dim_head < 1:
            raise VitrailError(f"dim_head = {dim_head!r}: expected a whole number from 1 up")
        row = token_defaults(
            {
                "size": as_size(image_size),
                "patch": tuple(patch_size) if isinstance(patch_size, list) else patch_size,
                "classes": num_classes,
                "width": dim,
                "depth": depth,
                "heads": heads,
                "head_width": 0 if dim_head * heads == dim else dim_head,
                "mlp": mlp_dim,
                "pool": "class" if pool == "cls" else "mean",
                "channels": channels,
                "dropout": dropout,
                "embedding_dropout": emb_dropout,
            }
        )
        a = ViTArchitecture(**row)
        if any(side % patch for side, patch in zip(a.size, sides_of(a.patch), strict=True)):
            raise VitrailError(
                f"image_size = {image_size} is not a multiple of patch_size = {patch_size}"
            )
        super().__init__(a)
