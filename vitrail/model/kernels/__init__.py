"""Triton kernels for NVIDIA GPUs, which read and write each tensor once.

`encoder` computes what `ViT.encode` does, with the residual stream in the precision of autocast.
Matrix products stay with PyTorch. Between them, three kinds of steps are fused: `attention`,
`gelu`, and a residual sum with the normalization after it (`sum_norm`). The backward kernels also
sum the gradient of the bias that the product before them adds. `group_norm` is for ResNets.
"""

from typing import Any

import torch
import triton
from torch import Tensor

CAPABILITIES = ((8, 0), (9, 0), (10, 0), (10, 3))
"""Data-center GPUs since the A100; others have less shared memory than attention takes."""
kernel: Any = triton.jit
"""Launched with more than its signature says, which type checkers do not know."""


def empty(like: Tensor, float8: bool) -> Tensor:
    """Contiguous, of the same shape."""
    return like.new_empty(like.shape, dtype=torch.float8_e4m3fn if float8 else like.dtype)


def programs(x: Tensor, each: int, most: int) -> int:
    """As many as run at the same time, a few on each multiprocessor."""
    count = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 2
    return min(each * count, most)
