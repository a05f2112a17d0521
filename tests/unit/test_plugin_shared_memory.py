"""The check of /dev/shm that all kinds share."""

from pathlib import Path

from hetero_llm.plugin.shared_memory import check_shared_memory


def test_enough_space_passes_and_says_how_much(tmp_path: Path) -> None:
    check = check_shared_memory("cpu", tmp_path, 1)
    assert (check.name, check.ok) == ("cpu.shm", True)
    assert f"GiB free in {tmp_path}" in check.text


def test_too_little_space_fails_with_both_numbers_and_a_way_out(tmp_path: Path) -> None:
    check = check_shared_memory("cuda", tmp_path, 1 << 60)
    assert check.ok is False
    assert f"{1 << 30} GiB are needed" in check.text
    assert f"docker run --shm-size={1 << 30}g" in check.next


def test_a_folder_that_is_not_there_fails(tmp_path: Path) -> None:
    check = check_shared_memory("ascend", tmp_path / "shm", 1)
    assert check.ok is False
    assert "No such file or directory" in check.text
