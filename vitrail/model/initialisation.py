"""Initial weights as JAX draws them; torch's defaults differ in every one of these."""

import math

from torch import Tensor, nn

# A unit normal cut at ±2σ has this standard deviation: JAX divides by it, so that the draw has the
# variance that was asked for. torch's trunc_normal_ does not, and cuts at absolute values ±2.
TRUNCATED_STD = 0.87962566103423978


def lecun_normal(weight: Tensor) -> None:
    """Truncated normal of variance 1 / fan-in: flax's default for dense layers and convolutions."""
    std = (1 / weight[0].numel()) ** 0.5 / TRUNCATED_STD
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


def xavier_stacked(weight: Tensor, parts: int) -> None:
    """Xavier-uniform for each of the matrices stacked in one fused weight.

    Drawn for the fused matrix as a whole, the bound would count all its outputs and come out too
    small (by √2 for query, key and value).
    """
    for part in weight.chunk(parts):
        nn.init.xavier_uniform_(part)


def dense(layer: nn.Linear, bias_std: float = 0.0) -> nn.Linear:
    """Xavier-uniform kernel; the MLP's biases start as noise of 1e-6, all others at zero."""
    nn.init.xavier_uniform_(layer.weight)
    if bias_std:
        nn.init.normal_(layer.bias, std=bias_std)
    else:
        nn.init.zeros_(layer.bias)
    return layer


def uniform_probe(probe: Tensor) -> None:
    """Xavier-uniform of a (1, 1, d) vector, which JAX counts as one input and d outputs."""
    bound = math.sqrt(6 / (1 + probe.shape[-1]))
    nn.init.uniform_(probe, -bound, bound)
