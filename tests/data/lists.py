"""A task of VTAB-1k in the form of file lists."""

from collections.abc import Sequence
from pathlib import Path

from tests.data.pictures import write


def write_lists(
    folder: Path, classes: int = 10, test: int = 30, pictures: Sequence[Path] = ()
) -> Path:
    """`train800.txt` and the others beside `images/`; class after class, and one picture, or the
    pictures given, under all names."""
    given = pictures or [write(folder / "images" / "one.png")]
    lines: dict[str, list[str]] = {}
    number = 0
    for part, count in {"train800": 800, "val200": 200, "test": test}.items():
        (folder / "images" / part).mkdir(parents=True)
        lines[part] = []
        for i in range(count):
            picture = given[number % len(given)]
            name = f"images/{part}/{i:04d}{picture.suffix}"
            (folder / name).symlink_to(picture)
            lines[part].append(f"{name} {number % classes}")
            number += 1
    lines["train800val200"] = lines["train800"] + lines["val200"]
    for part, listed in lines.items():
        (folder / f"{part}.txt").write_text("".join(line + "\n" for line in listed))
    return folder
