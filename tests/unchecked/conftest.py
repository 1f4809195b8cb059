"""The order of tests without shape checking."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that fork come first: once a process has compiled or exported a model, its autograd
    refuses to work in a fork. Workers take tests in this order."""
    items.sort(
        key=lambda item: item.path.stem not in ("test_distributed", "test_leaves", "test_resume")
    )
