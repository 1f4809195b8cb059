"""Features in the source's order, computed once for each picture that a model is shown."""

import numpy as np
import pytest
import torch

from tests.models import small
from vitrail import VitrailError
from vitrail.data.dataset import ArraySource, Subset
from vitrail.data.preprocessing import Preprocessing
from vitrail.evaluation import features
from vitrail.evaluation.features import extract, identity, open_cache


@pytest.fixture
def source() -> ArraySource:
    pixels = np.random.default_rng(0).integers(0, 255, (7, 20, 24, 3), dtype=np.uint8)
    return ArraySource(("a", "b"), np.arange(7) % 2, [f"{i}.png" for i in range(7)], pixels)


@pytest.fixture
def model():
    found = small("vit", size=32)
    found.preprocess = Preprocessing(size=(32, 32))
    return found.eval()


class Counting:
    """How many pictures a model is shown."""

    def __init__(self, model) -> None:
        self.pictures = 0
        model.embedding.register_forward_hook(self.note)

    def note(self, module, inputs, output) -> None:
        self.pictures += len(output)


def test_they_are_what_the_model_says_in_the_sources_order(source, model):
    found = extract(model, source, batch=3)
    assert model.preprocess is not None
    pixels = torch.stack([model.preprocess(source.image(i)) for i in range(7)])
    with torch.no_grad():
        assert torch.allclose(found.vectors, model.features(pixels), atol=1e-5)
    assert found.targets.tolist() == source.targets.tolist()
    assert found.indices.tolist() == list(range(7))


def test_a_picture_is_computed_once_whatever_it_is_called(source, model, tmp_path):
    seen = Counting(model)
    first = extract(model, source, cache=open_cache(model, None, tmp_path))
    assert seen.pictures == 7
    renamed = ArraySource(source.labels, source.targets, list("abcdefg"), source.pixels)
    again = extract(model, renamed, cache=open_cache(model, None, tmp_path))
    assert seen.pictures == 7
    assert torch.equal(first.vectors, again.vectors)
    part = Subset(source, np.array([5, 2]))
    few = extract(model, part, cache=open_cache(model, None, tmp_path))
    assert seen.pictures == 7
    assert torch.equal(few.vectors, first.vectors[[5, 2]])


def test_only_a_changed_picture_is_computed_again(source, model, tmp_path):
    before = extract(model, source, cache=open_cache(model, None, tmp_path))
    seen = Counting(model)
    source.pixels[3] = 255 - source.pixels[3]
    after = extract(model, source, cache=open_cache(model, None, tmp_path))
    assert seen.pictures == 1
    same = [i for i in range(7) if i != 3]
    assert torch.equal(before.vectors[same], after.vectors[same])
    assert not torch.allclose(before.vectors[3], after.vectors[3])


def test_models_that_see_otherwise_share_nothing(model):
    before = identity(model, None)
    with torch.no_grad():
        model.head.weight += 1.0
    assert identity(model, None) == before  # a head reads features, it does not make them
    assert identity(model, torch.bfloat16) != before
    model.preprocess = Preprocessing(size=(32, 32), mean=(0.4, 0.4, 0.4))
    other = identity(model, None)
    assert other != before
    with torch.no_grad():
        model.blocks[0].attention.out.bias[0] += 1e-6
    assert identity(model, None) != other


@pytest.mark.parametrize("part", ["keys", "vectors"])
def test_a_damaged_file_is_computed_again(source, model, tmp_path, part):
    extract(model, source, cache=open_cache(model, None, tmp_path))
    (path,) = tmp_path.rglob(f"*.{part}.npy")
    path.write_bytes(path.read_bytes()[:100])
    seen = Counting(model)
    extract(model, source, cache=open_cache(model, None, tmp_path))
    assert seen.pictures == 7


def test_a_place_that_cannot_be_written_costs_time_and_is_told(source, model, tmp_path, capsys):
    (tmp_path / "features").write_text("a file where a folder should be")
    found = extract(model, source, cache=open_cache(model, None, tmp_path))
    assert len(found.vectors) == 7
    assert "features are not cached: cannot write" in capsys.readouterr().err


def test_what_a_head_or_dropout_is_like_changes_nothing(model, source, tmp_path):
    extract(model, source, cache=open_cache(model, None, tmp_path))
    model.replace_head(3)
    seen = Counting(model)
    extract(model, source, cache=open_cache(model, None, tmp_path))
    assert seen.pictures == 0


def test_a_long_extraction_is_written_on_the_way(source, model, tmp_path, monkeypatch):
    monkeypatch.setattr(features, "_FLUSH", 3)
    cache = open_cache(model, None, tmp_path)
    found = extract(model, source, batch=2, cache=cache)
    assert len(list(tmp_path.rglob("*.keys.npy"))) == 2  # after four pictures, and at the end
    again = extract(model, source, cache=open_cache(model, None, tmp_path))
    assert torch.equal(found.vectors, again.vectors)


def test_a_model_without_preprocessing_is_one_line(source, model):
    model.preprocess = None
    with pytest.raises(VitrailError, match="no preprocessing"):
        extract(model, source)
