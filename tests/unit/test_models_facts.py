import json
import struct
from pathlib import Path

import pytest

from hetero_llm.errors import ModelFolderInvalid
from hetero_llm.models.facts import read_facts

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 256,
    "intermediate_size": 512,
    "vocab_size": 320,
    "max_position_embeddings": 2048,
    "dtype": "bfloat16",
}


def safetensors(name: str = "w", rows: int = 4, columns: int = 8) -> bytes:
    """A file of one bf16 tensor, written by the format's own description."""
    size = rows * columns * 2
    header = json.dumps(
        {"__metadata__": {"format": "pt"}, name: {"dtype": "BF16", "shape": [rows, columns], "data_offsets": [0, size]}}
    ).encode()
    return struct.pack("<Q", len(header)) + header + bytes(size)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "model.safetensors").write_bytes(safetensors())
    (path / "tokenizer.json").write_text("{}")
    return path


def configure(folder: Path, **changes: object) -> None:
    config = {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))


def refusal(folder: Path) -> str:
    with pytest.raises(ModelFolderInvalid) as caught:
        read_facts(folder, "m", "m")
    return f"{caught.value.report.message}: {caught.value.report.cause}"


def test_facts_come_from_config_and_headers(folder: Path):
    facts = read_facts(folder, "m", "source")
    assert (facts.name, facts.source, facts.path) == ("m", "source", str(folder))
    assert (facts.layers, facts.heads, facts.kv_heads, facts.head_dim) == (2, 4, 2, 64)
    assert (facts.parameters, facts.weights_bytes, facts.dtype) == (32, 64, "bfloat16")
    assert facts.max_model_len == 2048


def test_shards_named_by_the_index_are_added_up(folder: Path):
    (folder / "model.safetensors").unlink()
    for name, file in (("x", "a.safetensors"), ("y", "b.safetensors")):
        (folder / file).write_bytes(safetensors(name))
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_facts(folder, "m", "m").parameters == 64


@pytest.fixture
def described(folder: Path) -> Path:
    """A folder with config and index, but neither weights nor tokenizer: what can be had without a download."""
    (folder / "model.safetensors").unlink()
    (folder / "tokenizer.json").unlink()
    index = {"metadata": {"total_size": 4096}, "weight_map": {"x": "a.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_config_and_index_are_enough_for_a_plan(described: Path):
    facts = read_facts(described, "m", "m", complete=False)
    assert (facts.weights_bytes, facts.parameters, facts.layers) == (4096, 2048, 2)
    assert facts.weights is None


def test_config_and_index_are_not_enough_to_serve(described: Path):
    assert "lacks 1 of the 1 weight files" in refusal(described)


def test_an_index_that_states_no_size_is_not_enough_for_a_plan(described: Path):
    (described / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "a.safetensors"}}))
    with pytest.raises(ModelFolderInvalid, match="lacks 1 of the 1 weight files"):
        read_facts(described, "m", "m", complete=False)


def test_weights_that_are_there_are_looked_at_for_a_plan_too(folder: Path):
    assert read_facts(folder, "m", "m", complete=False) == read_facts(folder, "m", "m")


def test_a_model_without_key_value_heads_has_as_many_as_query_heads(folder: Path):
    configure(folder, num_key_value_heads=None)
    assert read_facts(folder, "m", "m").kv_heads == 4


def test_an_explicit_head_size_wins(folder: Path):
    configure(folder, head_dim=128)
    assert read_facts(folder, "m", "m").head_dim == 128


def test_a_multimodal_model_is_read_through_its_text_config(folder: Path):
    configure(folder, architectures=["Qwen2VLForConditionalGeneration"], text_config={"num_hidden_layers": 7})
    facts = read_facts(folder, "m", "m")
    assert (facts.architecture, facts.layers) == ("Qwen2VLForConditionalGeneration", 7)


def test_linear_rope_scaling_lengthens_the_context(folder: Path):
    configure(folder, rope_scaling={"type": "linear", "factor": 4.0})
    assert read_facts(folder, "m", "m").max_model_len == 8192


def test_yarn_states_the_scaled_context_already(folder: Path):
    configure(folder, rope_scaling={"rope_type": "yarn", "factor": 4.0})
    assert read_facts(folder, "m", "m").max_model_len == 2048


def test_the_tokenizer_can_limit_the_context(folder: Path):
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 1024}))
    assert read_facts(folder, "m", "m").max_model_len == 1024


def test_latent_attention_is_recognised(folder: Path):
    configure(folder, kv_lora_rank=512, qk_rope_head_dim=64)
    assert read_facts(folder, "m", "m").latent_kv_size == 576


def test_quantisation_is_named(folder: Path):
    configure(folder, quantization_config={"quant_method": "awq"})
    assert read_facts(folder, "m", "m").quantization == "awq"


def test_without_a_dtype_in_the_config_the_weights_tell(folder: Path):
    configure(folder, dtype=None)
    assert read_facts(folder, "m", "m").dtype == "bfloat16"


def test_a_missing_folder_is_refused(tmp_path: Path):
    assert "does not exist" in refusal(tmp_path / "nowhere")


def test_a_file_is_not_a_folder(folder: Path):
    assert "is a file" in refusal(folder / "config.json")


def test_a_missing_config_is_named(folder: Path):
    (folder / "config.json").unlink()
    assert "has no config.json" in refusal(folder)


def test_an_unreadable_config_says_where(folder: Path):
    (folder / "config.json").write_text('{"a": ')
    assert "config.json cannot be read: JSONDecodeError" in refusal(folder)


def test_a_config_that_is_a_list_is_refused(folder: Path):
    (folder / "config.json").write_text("[]")
    assert "found list" in refusal(folder)


@pytest.mark.parametrize("value", [None, 0, "four", True])
def test_a_missing_or_senseless_number_is_named(folder: Path, value: object):
    configure(folder, num_attention_heads=value)
    assert "`num_attention_heads`" in refusal(folder)


def test_a_config_without_architecture_is_refused(folder: Path):
    configure(folder, architectures=None)
    assert "names no architecture" in refusal(folder)


def test_missing_weights_are_named(folder: Path):
    (folder / "model.safetensors").unlink()
    assert "has no weights" in refusal(folder)


def test_weights_of_another_format_are_named(folder: Path):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "found pytorch_model.bin, but only *.safetensors" in refusal(folder)


def test_a_missing_shard_is_named(folder: Path):
    index = {"weight_map": {"x": "model.safetensors", "y": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "lacks 1 of the 2 weight files that its index names: model-2.safetensors" in refusal(folder)


def test_an_unreadable_index_is_named(folder: Path):
    (folder / "model.safetensors.index.json").write_text("[]")
    assert "model.safetensors.index.json cannot be read" in refusal(folder)


@pytest.mark.parametrize("kept", [0, 5, 40, -1])
def test_a_truncated_weight_file_is_refused(folder: Path, kept: int):
    whole = safetensors()
    (folder / "model.safetensors").write_bytes(whole[:kept])
    assert "model.safetensors is not a complete safetensors file" in refusal(folder)


def test_a_truncated_weight_file_is_refused_with_both_sizes(folder: Path):
    whole = safetensors()
    (folder / "model.safetensors").write_bytes(whole[:-1])
    assert f"the file has {len(whole) - 1} bytes, its header describes {len(whole)}" in refusal(folder)


def test_a_git_lfs_pointer_is_recognised(folder: Path):
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "Git LFS pointer" in refusal(folder)


def test_a_header_of_another_shape_is_refused(folder: Path):
    header = b'{"w": {"shape": [1]}}'
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert "its header is not the JSON" in refusal(folder)


def test_a_missing_tokenizer_is_named(folder: Path):
    (folder / "tokenizer.json").unlink()
    assert "has no tokenizer" in refusal(folder)
