"""The public names; the import arrow is checked by import-linter beside the tests."""

import subprocess
import sys

import pytest

import vitrail


def test_the_public_names_are_these():
    assert sorted(vitrail.PUBLIC) == [
        "Classifier",
        "VitrailError",
        "benchmark",
        "convert",
        "create",
        "evaluate",
        "export",
        "fewshot",
        "inspect",
        "load",
        "predict",
        "save",
        "train",
    ]
    for name in vitrail.PUBLIC:
        assert getattr(vitrail, name).__name__ == name
    with pytest.raises(AttributeError):
        _ = vitrail.nothing


def test_the_library_needs_no_test_oracle_and_no_extra():
    code = (
        "import sys, vitrail; "
        "[sys.modules.__setitem__(name, None) for name in ('timm', 'transformers', 'scipy', "
        "'sklearn', 'huggingface_hub', 'beartype')]; "
        "vitrail.create('Ti/16', depth=1); vitrail.load; vitrail.convert; "
        "from vitrail.weights.listing import listing; assert listing()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
