"""What holds for every test."""

import os

# pytest-xdist tells its workers the terminal's width this way; commands under test would take it for the user's wish.
os.environ.pop("COLUMNS", None)


def pytest_collection_modifyitems(items):
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if ("vllm" in marks or "e2e" in item.path.parts) and "waits" not in marks:
            item.add_marker("alone")
