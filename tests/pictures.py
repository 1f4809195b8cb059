"""Picture files that no camera writes."""

import io

from PIL import Image


def many_scans(count: int, between: bytes = b"") -> bytes:
    """A progressive JPEG file of 64 x 64 pixels with so many scans, the last ones all the same."""
    file = io.BytesIO()
    Image.linear_gradient("L").resize((64, 64)).save(file, "JPEG", progressive=True)
    data = file.getvalue().removesuffix(b"\xff\xd9")
    scans = data.count(b"\xff\xda")
    last = data[data.rindex(b"\xff\xda") :]
    return data + (between + last) * (count - scans) + b"\xff\xd9"
