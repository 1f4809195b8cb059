"""Real weights and photographs, which lie in ../shared beside the checkout where they are there.

An extra: what these tests prove of real data, others prove of small fixtures.
"""

import io
import tarfile
from pathlib import Path

import pytest
from PIL import Image

SHARED = Path(__file__).parents[3] / "shared"


def shared(pattern: str) -> list[Path]:
    """Files below ../shared; the test is left out where there are none."""
    found = sorted(SHARED.glob(pattern))
    if not found:
        pytest.skip(f"needs {SHARED / pattern}")
    return found


@pytest.fixture(scope="session")
def real_weights() -> Path:
    """ViT-Ti/16 (AugReg), as timm has it."""
    return shared("weights/vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors")[0]


@pytest.fixture(scope="session")
def flower_archives() -> list[Path]:
    return shared("data/flower_photos-*.tar")


@pytest.fixture(scope="session")
def cifar_archive() -> Path:
    """CIFAR-10's test part."""
    return shared("data/cifar10-test.tar")[0]


@pytest.fixture(scope="session")
def flowers(flower_archives) -> list[Image.Image]:
    """64 real photographs, from all five classes."""
    pictures = []
    for archive in flower_archives:
        with tarfile.open(archive) as tar:
            names = [name for name in tar.getnames() if name.endswith(".jpg")]
            for name in names[:: len(names) // 32][:32]:
                member = tar.extractfile(name)
                assert member is not None
                pictures.append(Image.open(io.BytesIO(member.read())).convert("RGB"))
    return pictures
