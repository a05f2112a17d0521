import os
from pathlib import Path

import pytest

from hetero_llm.models import cache
from hetero_llm.models.aliases import ALIASES

SOURCE = "ab" * 32


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "weights").write_bytes(b"12345")
    cache.write_manifest(path, SOURCE, {"weights": cache.sha256_of(path / "weights", "", quiet)})
    return path


def quiet(phase: str, done: int | None, total: int | None) -> None:
    """No progress is looked at."""


def unread(phase: str, done: int | None, total: int | None) -> None:
    pytest.fail("a file was read although its size and time say that it is the same")


def test_an_untouched_folder_is_accepted_without_reading_it(folder: Path):
    assert cache.is_intact(folder, SOURCE, unread)


def test_a_copied_folder_is_read_once(folder: Path):
    os.utime(folder / "weights", ns=(0, 0))
    assert cache.is_intact(folder, SOURCE, quiet)
    assert cache.is_intact(folder, SOURCE, unread)


def test_changed_content_is_found(folder: Path):
    (folder / "weights").write_bytes(b"54321")
    os.utime(folder / "weights", ns=(0, 0))
    assert not cache.is_intact(folder, SOURCE, quiet)


def test_a_truncated_file_is_found(folder: Path):
    (folder / "weights").write_bytes(b"123")
    assert not cache.is_intact(folder, SOURCE, unread)


def test_a_missing_file_is_found(folder: Path):
    (folder / "weights").unlink()
    assert not cache.is_intact(folder, SOURCE, unread)


def test_a_folder_made_from_another_source_is_not_accepted(folder: Path):
    assert not cache.is_intact(folder, "cd" * 32, unread)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 99, "files": {}}', '{"version": 1, "files": {"w": {}}}'])
def test_a_manifest_nobody_can_read_vouches_for_nothing(folder: Path, text: str):
    (folder / cache.MANIFEST_NAME).write_text(text)
    assert not cache.is_intact(folder, SOURCE, quiet)


def test_the_lock_is_free_again_after_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HETERO_LLM_CACHE_DIR", str(tmp_path))
    for _ in range(2):
        with cache.exclusive("m", waiting=lambda: pytest.fail("nobody holds the lock")):
            pass


@pytest.mark.parametrize("alias", ALIASES.values(), ids=lambda alias: alias.name)
def test_every_alias_pins_its_source_and_its_result(alias):
    assert len(alias.file_sha256) == 64
    assert all(len(digest) == 64 for digest in alias.converted_sha256.values())
    assert "model.safetensors" in alias.converted_sha256
