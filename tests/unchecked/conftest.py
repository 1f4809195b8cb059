"""The order of tests without shape checking."""

import pytest

_FIRST = ("test_distributed", "test_leaves", "test_resume", "test_paper")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that fork come first: once a process has compiled or exported a model, its autograd
    refuses to work in a fork. The longest test comes next, or it would run alone at the end.
    Workers take tests in this order."""
    items.sort(key=lambda item: (*_FIRST, item.path.stem).index(item.path.stem))
