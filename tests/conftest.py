"""A cache of their own for the tests, pictures that look like something, and a checkpoint."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_images

from tests.data.gallery import scene
from tests.models import timm_checkpoint

# Tests run side by side, one process per core: more threads would only get in each other's way.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # of the commands that they run


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing is kept in, or taken from, the user's own cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VITRAIL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where datasets lie; nothing can be fetched."""
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("VITRAIL_DATA", str(tmp_path / "data"))
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    return tmp_path / "data"


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """timm's ViT-Ti/16 under the name of a published one, with two blocks and random weights."""
    name = "vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors"
    return timm_checkpoint(tmp_path_factory.mktemp("weights") / name, depth=2)


@pytest.fixture(scope="session")
def scenes() -> list[Image.Image]:
    """The two photographs of scikit-learn, and 62 synthetic ones."""
    photographs = [Image.fromarray(pixels) for pixels in load_sample_images().images]
    # A little darker, so that they can be made brighter, as photographs can.
    made = (scene(seed, 320, 240).point(lambda value: 0.75 * value) for seed in range(62))
    return [*photographs, *made]
