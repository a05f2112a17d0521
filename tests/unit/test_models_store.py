import json
import struct
from pathlib import Path

import pytest

from hetero_llm.errors import ModelFolderInvalid, UnknownModel
from hetero_llm.models import store
from hetero_llm.models.aliases import ALIASES, DEFAULT_ALIAS


@pytest.fixture(autouse=True)
def own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETERO_LLM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)


def write_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "hidden_size": 128,
        "vocab_size": 64,
        "max_position_embeddings": 128,
    }
    (folder / "config.json").write_text(json.dumps(config))
    header = json.dumps({"w": {"dtype": "F16", "shape": [2], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def write_download(root: Path, hub_id: str) -> Path:
    repository = root / "hf" / "hub" / f"models--{hub_id.replace('/', '--')}"
    snapshot = write_model(repository / "snapshots" / "c0ffee")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("c0ffee")
    return snapshot


def test_a_folder_is_served_under_its_own_name(tmp_path: Path):
    folder = write_model(tmp_path / "my-model")
    found = store.resolve(str(folder))
    assert (found.name, found.path, found.prepared) == ("my-model", folder, True)


def test_a_folder_with_a_trailing_slash_has_the_same_name(tmp_path: Path):
    folder = write_model(tmp_path / "my-model")
    assert store.resolve(f"{folder}/").name == "my-model"


def test_a_relative_folder_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_model(tmp_path / "org" / "my-model")
    monkeypatch.chdir(tmp_path)
    assert store.resolve("org/my-model").path == tmp_path / "org" / "my-model"


def test_a_path_that_does_not_exist_is_called_a_missing_folder():
    with pytest.raises(ModelFolderInvalid, match="/no/such/folder does not exist"):
        store.resolve("/no/such/folder")


def test_the_alias_can_be_planned_without_converting_anything(tmp_path: Path):
    found = store.resolve(DEFAULT_ALIAS, prepare=False)
    assert found.facts == ALIASES[DEFAULT_ALIAS].facts
    assert not found.prepared
    assert not (tmp_path / "cache").exists()


def test_a_typo_gets_a_suggestion():
    with pytest.raises(UnknownModel) as caught:
        store.resolve("smolm2-135")
    assert f"did you mean {DEFAULT_ALIAS}?" in caught.value.report.next


def test_a_name_like_nothing_gets_no_wild_guess():
    with pytest.raises(UnknownModel) as caught:
        store.resolve("zzz")
    assert not any("did you mean" in step for step in caught.value.report.next)


def test_a_hub_id_nobody_downloaded_says_how_to_get_it():
    with pytest.raises(UnknownModel) as caught:
        store.resolve("org/some-model")
    assert caught.value.report.next[0] == "download it: hf download org/some-model --local-dir ./some-model"


def test_a_downloaded_hub_id_is_found(tmp_path: Path):
    snapshot = write_download(tmp_path, "org/some-model")
    found = store.resolve("org/some-model")
    assert (found.name, found.path) == ("org/some-model", snapshot)


def test_half_a_download_is_refused_with_what_is_missing(tmp_path: Path):
    (write_download(tmp_path, "org/some-model") / "model.safetensors").unlink()
    with pytest.raises(ModelFolderInvalid, match=r"the download of org/some-model is not complete: .* has no weights"):
        store.resolve("org/some-model")


def test_the_list_has_bundled_models_and_complete_downloads(tmp_path: Path):
    write_download(tmp_path, "org/whole")
    (write_download(tmp_path, "org/half") / "config.json").unlink()
    assert [(item.name, item.origin) for item in store.list_models()] == [
        (DEFAULT_ALIAS, "bundled"),
        ("org/whole", "huggingface"),
    ]


def test_show_tells_where_a_model_comes_from(tmp_path: Path):
    write_download(tmp_path, "org/whole")
    folder = write_model(tmp_path / "mine")
    assert store.show("org/whole").origin == "huggingface"
    assert store.show(str(folder)).origin == "folder"
    assert store.show(DEFAULT_ALIAS).origin == "bundled"


def test_removing_what_was_never_converted_frees_nothing():
    assert store.remove(DEFAULT_ALIAS) == 0


def test_a_converted_model_is_removed_and_its_size_told(tmp_path: Path):
    folder = tmp_path / "cache" / "models" / ALIASES[DEFAULT_ALIAS].folder_name
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(bytes(100))
    assert store.remove(DEFAULT_ALIAS) == 100
    assert not folder.exists()


def test_a_users_folder_is_never_removed(tmp_path: Path):
    folder = write_model(tmp_path / "mine")
    with pytest.raises(UnknownModel, match="is not a model that hetero-llm keeps"):
        store.remove(str(folder))
    assert folder.exists()
