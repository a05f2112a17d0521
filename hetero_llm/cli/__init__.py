"""The command line: one file per verb; only render.py prints."""
