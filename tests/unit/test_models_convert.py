"""The parent's side of the conversion, with a stand-in at the process border: a small program instead of torch."""

import hashlib
import json
import stat
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hetero_llm.errors import ModelConversionFailed
from hetero_llm.models import convert
from hetero_llm.models.aliases import ALIASES, Alias

SOURCE = b"the bundled file"
RESULT = b"the weights"

GOOD = """
import json, os, sys
print("a library says hello")
print(json.dumps({"phase": "converting weights", "done": 1, "total": 2}), flush=True)
path = sys.argv[2] + "/model.safetensors"
open(path, "wb").write(b"the weights")
os.chmod(path, 0o600)
open(sys.argv[2] + "/generation_config.json", "w").write("{\\"eos_token_id\\": 2}")
"""
BROKEN = """
import json, sys
print(json.dumps({"error": "ValueError: no such tensor"}), flush=True)
sys.exit(1)
"""
CRASHING = "import sys; print('Fatal: out of luck', file=sys.stderr); sys.exit(7)"


@pytest.fixture
def alias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Alias:
    monkeypatch.setenv("HETERO_LLM_CACHE_DIR", str(tmp_path / "cache"))
    package = tmp_path / "site" / "hetero_llm_test_wheel"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('located, never imported')")
    (package / "model.gguf").write_bytes(SOURCE)
    monkeypatch.syspath_prepend(package.parent)
    return replace(
        next(iter(ALIASES.values())),
        package=package.name,
        file="model.gguf",
        file_sha256=hashlib.sha256(SOURCE).hexdigest(),
        converted_sha256={"model.safetensors": hashlib.sha256(RESULT).hexdigest()},
    )


@pytest.fixture
def converter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Put a program in the place of ``python -m hetero_llm.models.convert_gguf``."""

    def install(program: str) -> None:
        script = tmp_path / "converter"
        script.write_text(f"#!/bin/sh\nshift 2\nexec {sys.executable} -c '{program}' \"$@\"\n")
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))

    return install


def failure(alias: Alias) -> ModelConversionFailed:
    with pytest.raises(ModelConversionFailed) as caught:
        convert.prepared_folder(alias, lambda *_: None)
    return caught.value


def quoted(program: str) -> str:
    return program.replace("'", '"')


def test_generation_defaults_are_written_beside_what_the_file_gave(alias: Alias, converter):
    converter(GOOD)
    folder = convert.prepared_folder(alias, lambda *_: None)
    defaults = json.loads((folder / "generation_config.json").read_text())
    assert defaults == {"eos_token_id": 2, "do_sample": True, "temperature": 0.2, "top_p": 0.9}


def test_a_conversion_is_reported_checked_and_put_in_place(alias: Alias, converter):
    converter(GOOD)
    seen = []
    folder = convert.prepared_folder(alias, lambda *progress: seen.append(progress))
    assert folder.name == alias.folder_name
    assert (folder / "model.safetensors").read_bytes() == RESULT
    assert ("converting weights", 1, 2) in seen


def test_the_result_is_readable_for_everybody(alias: Alias, converter):
    converter(GOOD)
    folder = convert.prepared_folder(alias, lambda *_: None)
    assert stat.S_IMODE((folder / "model.safetensors").stat().st_mode) == 0o644


def test_the_second_time_nothing_is_converted(alias: Alias, converter):
    converter(GOOD)
    folder = convert.prepared_folder(alias, lambda *_: None)
    converter(quoted(CRASHING))
    assert convert.prepared_folder(alias, lambda *_: None) == folder


def test_a_damaged_result_is_made_anew(alias: Alias, converter):
    converter(GOOD)
    folder = convert.prepared_folder(alias, lambda *_: None)
    (folder / "model.safetensors").write_bytes(b"xx")
    convert.prepared_folder(alias, lambda *_: None)
    assert (folder / "model.safetensors").read_bytes() == RESULT


def test_the_converters_error_is_the_cause(alias: Alias, converter):
    converter(BROKEN)
    assert failure(alias).report.cause == "ValueError: no such tensor"


def test_a_crash_without_a_word_is_told_by_the_log(alias: Alias, converter):
    converter(quoted(CRASHING))
    error = failure(alias)
    assert error.report.cause == "Fatal: out of luck"
    assert error.report.log is not None
    assert Path(error.report.log).read_text() == "Fatal: out of luck\n"


def test_a_failed_conversion_leaves_no_folder(alias: Alias, converter, tmp_path: Path):
    converter(BROKEN)
    failure(alias)
    assert [path.name for path in (tmp_path / "cache" / "models").iterdir() if path.is_dir()] == []


def test_another_result_than_the_pinned_one_is_refused(alias: Alias, converter):
    converter(GOOD)
    error = failure(replace(alias, converted_sha256={"model.safetensors": "0" * 64}))
    assert "gave another model.safetensors than it should" in str(error)


def test_another_source_than_the_pinned_one_is_refused(alias: Alias, converter):
    converter(GOOD)
    assert "is not the known file" in str(failure(replace(alias, file_sha256="0" * 64)))


def test_a_wheel_that_is_not_installed_is_named_with_the_command(alias: Alias):
    error = failure(replace(alias, package="hetero_llm_no_such_wheel"))
    assert "hetero_llm_no_such_wheel" in (error.report.cause or "")
    assert error.report.next == (alias.install,)


def test_a_cache_that_cannot_be_written_is_named(alias: Alias, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HETERO_LLM_CACHE_DIR", str(tmp_path / "file"))
    assert "cannot write" in str(failure(alias))


def test_too_little_space_is_told_with_both_numbers(alias: Alias, converter):
    converter(GOOD)
    huge = replace(alias, facts=replace(alias.facts, weights_bytes=1 << 60))
    assert "MiB are needed" in (failure(huge).report.cause or "")
