"""Broken uploads for a server: each gets 200 where it still decodes, 4xx otherwise, nothing else.

    python -m benchmarks.malformed [--uploads 10000] [--seed 0]

Bit flips, truncations, bytes left out or doubled, heads of one format before another, bombs, files
of other kinds, broken forms. The server runs in a process of its own and must outlive them all.
"""

import argparse
import http.client
import io
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image

import vitrail
from benchmarks.serving import server
from vitrail.data.decode import decode, readable
from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import VitrailError

FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM")
MOST_PIXELS = 50_000_000
NARROWEST = 30_000
"""Times longer than wide; such a line would become an image of too many pixels."""
OTHERS = (
    b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n",
    b"<svg xmlns='http://www.w3.org/2000/svg'><rect width='9' height='9'/></svg>",
    b"%PDF-1.4\n1 0 obj\n<<>>\nendobj\n",
    b"PK\x03\x04" + bytes(60),
    b'{"image": "aGVsbG8="}',
    b"<!DOCTYPE html><title>no picture</title>",
    b"GIF89a",
    b"\x89PNG\r\n\x1a\n",
    b"\xff\xd8\xff\xe0",
    bytes(1000),
)


def pictures(chance: np.random.Generator) -> list[bytes]:
    """Small pictures in every format."""
    found = []
    for kind in FORMATS:
        pixels = chance.integers(0, 256, (24, 31, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).resize((62, 48)).save(file, kind)
        found.append(file.getvalue())
    return found


def bombs() -> list[bytes]:
    """A few bytes that speak of many pixels."""
    found = []
    for kind, size in (("PNG", (20_000, 20_000)), ("GIF", (30_000, 30_000)), ("PNG", (1, 900_000))):
        file = io.BytesIO()
        Image.new("1" if kind == "PNG" else "P", (1, 1)).save(file, kind)
        data = bytearray(file.getvalue())
        if kind == "PNG":
            data[16:24] = size[0].to_bytes(4, "big") + size[1].to_bytes(4, "big")
        else:
            data[6:10] = size[0].to_bytes(2, "little") + size[1].to_bytes(2, "little")
        found.append(bytes(data))
    file = io.BytesIO()
    Image.new("1", (9_000, 9_000)).save(file, "PNG")
    found.append(file.getvalue())
    file = io.BytesIO()
    Image.new("L", (1, 60_000)).save(file, "PNG")  # to be made 224 pixels wide, and as much taller
    found.append(file.getvalue())
    return found


def uploads(count: int, seed: int = 0) -> Iterator[bytes]:
    """Broken bodies, another sequence for every seed."""
    chance = np.random.default_rng(seed)
    good, large = pictures(chance), bombs()
    for number in range(count):
        data = bytearray(good[chance.integers(len(good))])
        match number % 8:
            case 0 | 1 | 2:
                for _ in range(chance.integers(1, 20)):
                    data[chance.integers(len(data))] ^= 1 << chance.integers(8)
            case 3:
                data = data[: chance.integers(len(data))]
            case 4:
                start, length = chance.integers(len(data)), chance.integers(1, 200)
                data[start : start + length] = data[:length] if number % 16 == 4 else b""
            case 5:
                other = good[chance.integers(len(good))]
                cut = chance.integers(4, 40)
                data = bytearray(other[:cut]) + data[cut:]
            case 6:
                data = bytearray(large[number // 8 % len(large)])
                data[-1 - number % 3] ^= 1
            case _:
                data = bytearray(OTHERS[number // 8 % len(OTHERS)])
                data += chance.integers(0, 256, chance.integers(40), dtype=np.uint8).tobytes()
        yield bytes(data)


def form(data: bytes, number: int) -> tuple[bytes, str]:
    """A form with that file; some of them broken."""
    head = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    whole = head + data + b"\r\n--x--\r\n"
    broken = (whole, whole[: len(whole) // 2], whole[7:], whole.replace(b"name=", b"nom="))
    kinds = ("multipart/form-data; boundary=x", "multipart/form-data")
    return broken[number % 4], kinds[number % 12 == 11]


def decodes(data: bytes) -> bool:
    """Whether the picture can be read at all, and is not too large or too narrow to be resized."""
    try:
        with readable("it"), Image.open(io.BytesIO(data)) as image:
            width, height = image.size
        large = width * height > MOST_PIXELS or max(width, height) > NARROWEST * min(width, height)
        return not large and decode(io.BytesIO(data), "it") is not None
    except VitrailError:
        return False


def main() -> None:
    """Print how many got which answer, and every answer that is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--uploads", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        model = vitrail.create("Ti/16", classes=5, size=32, depth=1)
        model.preprocess = Preprocessing(size=(32, 32), short_side=36)
        vitrail.save(model, path)
        with server(str(path)) as (_, port):
            run(port, asked.uploads, asked.seed)


def run(port: int, count: int, seed: int) -> None:
    """All uploads, one after the other; every third as a form."""
    statuses: Counter[int] = Counter()
    wrong, start = 0, time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    for number, data in enumerate(uploads(count, seed)):
        as_form = number % 3 == 0
        body, kind = form(data, number // 3) if as_form else (data, "image/png")
        connection.request("POST", "/predict", body, {"Content-Type": kind})
        answer = connection.getresponse()
        said = answer.read()
        statuses[answer.status] += 1
        fine = answer.status == 200 or 400 <= answer.status < 500
        if not as_form:
            fine = fine and (answer.status == 200) == decodes(data)
        if not fine:
            wrong += 1
            print(number, answer.status, said[:200], data[:40])
    print(
        f"{count:,} uploads, {wrong} answered wrongly, {dict(sorted(statuses.items()))}, "
        f"{time.perf_counter() - start:.0f} s"
    )


if __name__ == "__main__":
    main()
