"""How the suite is shared out to its two workers (pytest-xdist, `--dist loadgroup`)."""

import os

import pytest

# pytest-xdist tells its workers the terminal's width this way; commands under test would take it for the user's wish.
os.environ.pop("COLUMNS", None)

LONG_FIRST = ("tests/e2e/", "tests/packaging/", "tests/integration/", "tests/contract/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep files whole, because their fixtures are, and let only one worker run real engines: they need the cores."""
    for item in items:
        file = item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group("vllm" if item.get_closest_marker("vllm") else file))
    items.sort(key=_start)


def _start(item: pytest.Item) -> tuple[bool, int]:
    """The group of the engines takes longest and goes first, then the longer folders; the order is kept otherwise."""
    place = next((n for n, folder in enumerate(LONG_FIRST) if item.nodeid.startswith(folder)), len(LONG_FIRST))
    return (item.get_closest_marker("vllm") is None, place)
