"""Many strings as one array of bytes, so that a NumPy file can hold them without pickle."""

from collections.abc import Iterable

import numpy as np
from jaxtyping import UInt8


def joined(strings: Iterable[str]) -> UInt8[np.ndarray, " bytes"]:
    """Each string with a zero byte behind it, which no file name can contain."""
    text = "".join(f"{string}\0" for string in strings)
    return np.frombuffer(text.encode("utf-8", "surrogateescape"), dtype=np.uint8)


def separate(array: UInt8[np.ndarray, " bytes"]) -> list[str]:
    """What `joined` was given."""
    return array.tobytes().decode("utf-8", "surrogateescape").split("\0")[:-1]
