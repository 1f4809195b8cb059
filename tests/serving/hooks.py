"""What schemathesis sends as a picture: a schema cannot say which bytes are one."""

import io

import schemathesis
from hypothesis import strategies
from PIL import Image

KINDS = {"image/png": "PNG", "image/jpeg": "JPEG", "image/webp": "WEBP", "image/gif": "GIF"}


def encoded(kind: str, size: tuple[int, int]) -> bytes:
    file = io.BytesIO()
    Image.linear_gradient("L").resize(size).save(file, kind)
    return file.getvalue()


for name, kind in KINDS.items():
    files = [encoded(kind, size) for size in ((1, 1), (40, 30), (300, 500))]
    schemathesis.openapi.media_type(name, strategies.sampled_from(files))
