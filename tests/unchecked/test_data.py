"""What a user gets for data settings of the wrong kind, where no checker stands in between."""

import numpy as np
import pytest

from vitrail import VitrailError
from vitrail.data.dataset import ArraySource, Splits, hold_out
from vitrail.data.opening import open_data


def test_a_way_to_split_that_does_not_exist_is_one_line():
    with pytest.raises(VitrailError, match=r"^data.split=random: expected hash or stratified$"):
        open_data("digits", split="random")


def test_whole_numbers_are_fractions_too():
    pixels = np.zeros((40, 1, 1), np.uint8)
    source = ArraySource(("a", "b"), np.arange(40) % 2, list(map(str, range(40))), pixels)
    assert list(hold_out(Splits(name="x", train=source), val=0, test=0, how="hash").parts) == [
        "train"
    ]
