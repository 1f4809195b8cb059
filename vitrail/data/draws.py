"""Random numbers as hashes of the seed and a position: no state, so nothing depends on the order in
which they are drawn, or on the process or device that draws them."""

import hashlib

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

ON_CPU, ON_DEVICE = 2, 4
"""Versions of the rules by which order, augmentation, mixing and masking are drawn, with
augmentation on the CPU and on the device: a run is resumed bit-exactly only with the same one."""


def derive_seed(*numbers: int) -> int:
    """A different seed for each combination of numbers."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def uniform(seed: int, positions: Int[Tensor, " b"], count: int) -> Float[Tensor, "b count"]:
    """Numbers from 0 up to 1, `count` for each position, on the positions' device.

    SplitMix64 of a counter (Steele et al. 2014) and no generator, so that the numbers of an image
    depend on the seed and its position alone, not on the batch, the process or the device.
    """
    counters = torch.arange(1, count + 1, device=positions.device)
    # Integers of 64 bits wrap around, as they should.
    x = seed + (positions[:, None] * count + counters) * _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    x = x ^ _shifted(x, 31)
    return _shifted(x, 40).float() / (1 << 24)


def symmetric_beta(
    alpha: float, first: Float[np.ndarray, "*b"], second: Float[np.ndarray, "*b"]
) -> Float[np.ndarray, "*b"]:
    """Numbers of Beta(alpha, alpha), each from two of `uniform`: none is rejected.

    1/2 + t / (2 sqrt(2 alpha + t²)), where t is Student's with 2 alpha degrees of freedom, by the
    polar method of Bailey (1994): t² = 2 alpha (u^(-1/alpha) - 1) cos²(2 pi v).
    """
    power, cosine = first ** (1 / alpha), np.cos(2 * np.pi * second)
    # Never divided by the power, which may be zero.
    root = np.sqrt((1 - power) / (power + (1 - power) * cosine**2))
    return (0.5 + 0.5 * cosine * root).clip(0, 1)


def _signed(number: int) -> int:
    """The 64 bits of a number as a signed one, the only kind that torch multiplies."""
    return number - (1 << 64) if number >> 63 else number


def _shifted(x: Int[Tensor, "..."], bits: int) -> Int[Tensor, "..."]:
    """Logical shift to the right, which fills with zeros from the left."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
