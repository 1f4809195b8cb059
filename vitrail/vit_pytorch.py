"""vit-pytorch's constructor, for code written against it: change the import, keep the call.

    from vitrail.vit_pytorch import ViT

It builds the paper's block, not vit-pytorch's. That differs from it in four ways: norms around
the patch embedding, no biases in query, key and value, attention dropout, and class token and
positions drawn from a unit normal. `pool="mean"` averages the patch tokens and has no class token
(appendix D.3). The paper ties the width of a head to dim / heads, so `dim_head` must equal that.
"""

from vitrail.errors import VitrailError
from vitrail.model.checks import as_size
from vitrail.model.variants import token_defaults
from vitrail.model.vit import ViT as VisionTransformer
from vitrail.model.vit import ViTArchitecture


class ViT(VisionTransformer):
    """The paper's ViT from vit-pytorch's arguments."""

    def __init__(  # noqa: PLR0913
        self,
        *,
        image_size: int | tuple[int, int],
        patch_size: int,
        num_classes: int,
        dim: int,
        depth: int,
        heads: int,
        mlp_dim: int,
        pool: str = "cls",
        channels: int = 3,
        dim_head: int | None = None,
        dropout: float = 0.0,
        emb_dropout: float = 0.0,
    ) -> None:
        if pool not in ("cls", "mean"):
            raise VitrailError(f"pool = '{pool}': expected 'cls' or 'mean'")
        if dim_head is not None and dim_head * heads != dim:
            raise VitrailError(f"dim_head = {dim_head}: the paper's heads are dim / heads wide")
        row = token_defaults(
            {
                "size": as_size(image_size),
                "patch": patch_size,
                "classes": num_classes,
                "width": dim,
                "depth": depth,
                "heads": heads,
                "mlp": mlp_dim,
                "pool": "class" if pool == "cls" else "mean",
                "channels": channels,
                "dropout": dropout,
                "embedding_dropout": emb_dropout,
            }
        )
        super().__init__(ViTArchitecture(**row))
