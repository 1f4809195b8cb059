"""Pixels of maps, overlays and pages."""

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail.data.preprocessing import Preprocessing
from vitrail.inspection.embeddings import Filters, PositionSimilarity
from vitrail.inspection.images import (
    Panel,
    captioned,
    clip_outliers,
    denormalize,
    filter_grid,
    heatmap,
    overlay,
    page,
    row,
    wrapped_rows,
)
from vitrail.inspection.pages import distance_chart, tile_height, tiled_maps


def test_the_photograph_is_what_the_model_was_given():
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (224, 240, 3), np.uint8))
    preprocess = Preprocessing(size=(224, 240), mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
    assert denormalize(preprocess(picture), preprocess).tobytes() == picture.tobytes()


def test_a_tiny_or_gray_picture_is_enlarged_by_a_whole_factor():
    preprocess = Preprocessing(size=(8, 10), mean=(0.5,), std=(0.5,))
    shown = denormalize(torch.zeros(1, 8, 10), preprocess)
    assert (shown.size, shown.mode) == ((280, 224), "RGB")
    assert shown.getpixel((0, 0)) == (128, 128, 128)


def test_an_overlay_is_dark_where_nothing_is_seen_and_clear_at_the_maximum():
    white = Image.new("RGB", (64, 64), "white")
    seen = torch.zeros(8, 8)
    seen[6, 1] = 0.3
    lit = np.asarray(overlay(white, seen, 4.0)).astype(int)
    assert lit.max() == 255
    assert np.unravel_index(lit[:, :, 0].argmax(), (64, 64))[0] in range(44, 60)
    assert np.unravel_index(lit[:, :, 0].argmax(), (64, 64))[1] in range(4, 20)
    assert lit[:16, 40:].max() <= 2
    assert (lit[:, :, 0] == lit[:, :, 2]).all()


def test_a_map_of_nothing_is_black():
    white = Image.new("RGB", (32, 32), "white")
    assert np.asarray(overlay(white, torch.zeros(2, 2), 4.0)).max() == 0
    assert np.asarray(heatmap(torch.zeros(2, 2), (8, 8))).max() < 8


def test_a_few_extreme_patches_do_not_hide_the_rest():
    seen = torch.full((10, 10), 0.5)
    seen[0, 0] = 100.0
    assert clip_outliers(seen).max() == pytest.approx(0.5)
    shown = np.asarray(heatmap(seen, (10, 10))).astype(int)
    assert (shown[0, 0] == shown[5, 5]).all()


def test_filters_are_stretched_around_gray():
    components = torch.zeros(9, 3, 2, 2)
    components[0, 0, 0, 0], components[0, 1, 1, 1] = 2.0, -1.0
    sheet = np.asarray(filter_grid(Filters(components, torch.ones(9), 9, ""), side=10, gap=2))
    assert sheet.shape == (22, 7 * 12 - 2, 3)
    assert sheet[2, 2].tolist() == [255, 128, 128]
    assert sheet[8, 8].tolist() == [128, 64, 128]
    one = filter_grid(Filters(torch.randn(1, 5, 2, 2), torch.ones(1), 1, ""), side=10)
    assert np.ptp(np.asarray(one), axis=2).max() == 0


def test_maps_of_positions_lie_where_their_patches_do():
    maps = torch.arange(6.0)[:, None, None].expand(6, 8, 8) / 10
    found = PositionSimilarity(maps, torch.tensor([0, 1]), torch.tensor([0, 1, 2]), "learned")
    mosaic, (rows, columns) = tiled_maps(found)
    for number in range(6):
        place = int(rows[number // 3]), int(columns[number % 3])
        assert mosaic[place] == pytest.approx(number / 10)
    assert np.isnan(mosaic[8]).all()


def test_as_many_layers_as_fit_stand_side_by_side():
    assert tile_height(3, 4, 1.0, 1376) == 104
    assert tile_height(16, 4, 1.0, 1376) == 82
    assert tile_height(1, 1, 1.0, 1376) == 150
    assert tile_height(64, 2, 4.0, 600) == 1


def test_pages_have_room_for_all_their_parts():
    parts = [Image.new("RGB", (300, 50), "red") for _ in range(5)]
    rows = wrapped_rows(parts, width=700, gap=30)
    assert [row.size for row in rows] == [(630, 50), (630, 50), (300, 50)]
    whole = np.asarray(page("a title " * 50, "words", rows))
    assert (whole == (255, 0, 0)).all(-1).sum() == 5 * 300 * 50
    panels = Panel(parts[0], "first"), Panel(parts[1], "second")
    labeled = row([captioned(panel, height=100) for panel in panels], 14)
    assert labeled.width == 2 * 600 + 14


def test_the_chart_of_distances_takes_one_layer_or_fifty():
    for count in (1, 50):
        chart = distance_chart(
            [{"layer": layer, "heads": [10.0, 20.0], "uniform": 30.0} for layer in range(count)],
            "mean over 2 images",
        )
        assert chart.width > 400
