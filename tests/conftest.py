"""Small models, real pictures and real weights for the tests."""

import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image

SHARED = Path(__file__).parents[2] / "shared"
REAL_WEIGHTS = SHARED / "weights" / "vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors"


# Tests run side by side, one process per core: more threads would only get in each other's way.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing is kept in, or taken from, the user's own cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VITRAIL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where data sets lie; nothing can be fetched."""
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("VITRAIL_DATA", str(tmp_path / "data"))
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    return tmp_path / "data"


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def real_weights() -> Path:
    if not REAL_WEIGHTS.exists():
        pytest.skip(f"needs the real ViT-Ti/16 weights in {REAL_WEIGHTS.parent}")
    return REAL_WEIGHTS


@pytest.fixture(scope="session")
def flowers() -> list[Image.Image]:
    """64 real photographs, from all five classes."""
    archives = sorted((SHARED / "data").glob("flower_photos-*.tar"))
    if not archives:
        pytest.skip(f"needs flower_photos in {SHARED / 'data'}")
    pictures = []
    for archive in archives:
        with tarfile.open(archive) as tar:
            names = [name for name in tar.getnames() if name.endswith(".jpg")]
            for name in names[:: len(names) // 32][:32]:
                member = tar.extractfile(name)
                assert member is not None
                pictures.append(Image.open(io.BytesIO(member.read())).convert("RGB"))
    return pictures
