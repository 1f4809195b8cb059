"""Every picture once, by one process or several."""

import os

import pytest
from PIL import Image

from tests.data.pictures import write_classes
from vitrail.data.dataset import Broken
from vitrail.data.folder import open_folder
from vitrail.data.loader import CHUNK, read_all
from vitrail.errors import FailureError


def width_and_process(picture: Image.Image) -> tuple[int, int]:
    return picture.width, os.getpid()


def die(picture: Image.Image) -> None:
    os._exit(1)


def test_several_processes_see_what_one_sees(tmp_path):
    source = open_folder(write_classes(tmp_path, {"a": CHUNK, "b": 5})).train
    (tmp_path / "a" / "3.png").write_bytes(b"no picture")
    steps: list[int] = []
    alone = list(read_all(source, width_and_process))
    shared = list(read_all(source, width_and_process, workers=2, progress=steps.append))
    assert steps == [CHUNK, 5]
    assert [index for index, _ in shared] == list(range(CHUNK + 5))
    torn = [seen for _, seen in shared if isinstance(seen, Broken)]
    assert [broken.name for broken in torn] == ["a/3.png"]
    assert torn == [seen for _, seen in alone if isinstance(seen, Broken)]
    assert os.getpid() not in {seen[1] for _, seen in shared if not isinstance(seen, Broken)}
    assert {seen[0] for _, seen in shared if not isinstance(seen, Broken)} == {16}


def test_a_process_that_dies_is_one_clear_line(tmp_path):
    source = open_folder(write_classes(tmp_path, {"a": 1, "b": 1})).train
    with pytest.raises(FailureError, match=r"died.*fewer workers"):
        list(read_all(source, die, workers=1))
