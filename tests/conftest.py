"""What holds for every test."""

import os

# pytest-xdist tells its workers the terminal's width this way; commands under test would take it for the user's wish.
os.environ.pop("COLUMNS", None)
