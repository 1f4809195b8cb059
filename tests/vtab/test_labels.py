"""VTAB's derived labels on hand-made annotations, at the edges of every class."""

import numpy as np
import pytest

from vitrail.errors import VitrailError
from vitrail.vtab import files as rules


def objects(*depths: float) -> list[dict]:
    return [{"pixel_coords": [11.0, 22.0, depth], "shape": "cube"} for depth in depths]


def test_clevr_counts_from_three_to_ten():
    found = [rules.clevr_count(objects(*[9.0] * n)) for n in range(3, 11)]
    assert found == list(range(8))


@pytest.mark.parametrize("n", [0, 2, 11])
def test_clevr_with_another_number_of_objects_is_an_error(n):
    with pytest.raises(VitrailError, match=f"has {n} objects; expected 3 to 10"):
        rules.clevr_count(objects(*[9.0] * n))


@pytest.mark.parametrize(
    ("depth", "label"),
    [
        *((0.1, 0), (8.0, 0), (8.01, 1), (8.5, 1), (8.6, 2), (9.0, 2), (9.1, 3), (9.5, 3)),
        *((9.6, 4), (10.0, 4), (10.1, 5), (100.0, 5)),
    ],
)
def test_clevr_distance_is_that_of_the_nearest_object(depth, label):
    assert rules.clevr_distance(objects(99.0, depth, 100.0)) == label


def test_a_depth_that_cannot_be_is_an_error():
    with pytest.raises(VitrailError, match="a distance of 0 is below 0"):
        rules.clevr_distance(objects(0.0))


def line(kind: str, z: float) -> str:
    return f"{kind} 0.00 0 1.85 387.63 181.54 423.81 203.12 1.67 1.87 3.69 -16.53 2.39 {z} 1.57"


@pytest.mark.parametrize(
    ("lines", "label"),
    [
        ([line("Car", 7.99)], 0),
        ([line("Car", 8.0)], 0),
        ([line("Van", 8.01)], 1),
        ([line("Truck", 20.0)], 1),
        ([line("Car", 20.01)], 2),
        ([line("Car", 500.0)], 2),
        ([line("Car", -1.5)], 0),
        ([line("Car", 30.0), line("Van", 9.0)], 1),
        ([line("Pedestrian", 2.0), line("Tram", 3.0), line("Cyclist", 4.0)], 3),
        ([line("DontCare", -1000.0), line("Misc", 1.0), line("Person_sitting", 1.0)], 3),
        ([line("Pedestrian", 2.0), line("Car", 25.0)], 2),
        ([""], 3),
        ([], 3),
    ],
)
def test_kitti_asks_for_the_nearest_car_van_or_truck(lines, label):
    assert rules.kitti_distance(lines) == label


def latents(column: int, values: int) -> np.ndarray:
    table = np.full((values, 6), 3, dtype=np.int64)
    table[:, column] = np.arange(values)
    return table


def test_dsprites_columns_are_joined_in_pairs():
    found = rules.dsprites_location(latents(4, 32))
    assert found.tolist() == [x // 2 for x in range(32)]


def test_dsprites_orientations_are_joined_by_two_and_a_half():
    found = rules.dsprites_orientation(latents(3, 40))
    assert found.tolist() == [int(x / 2.5) for x in range(40)]
    assert np.bincount(found).tolist() == [3, 2] * 8


def test_small_norb_directions_and_heights():
    azimuths = np.array([[4, 0, 2 * i, 1] for i in range(18)])
    elevations = np.array([[4, i, 34, 1] for i in range(9)])
    assert rules.smallnorb_azimuth(azimuths).tolist() == list(range(18))
    assert rules.smallnorb_elevation(elevations).tolist() == list(range(9))
