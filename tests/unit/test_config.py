"""hetero-llm.yaml: shape, precedence, and complaints that point at the place."""

import os
from pathlib import Path

import pytest

from hetero_llm.config import json_schema, load_config, parse_size_bytes
from hetero_llm.errors import ConfigInvalid, ConfigUnreadable

DOCUMENTED = """\
cluster: {address: auto}
gateway: {host: 127.0.0.1, port: 8000, grpc_port: 9000, api_keys_file: keys.yaml, replicas: 1}
models:
  - name: qwen2.5-14b
    source: Qwen/Qwen2.5-14B-Instruct     # hub id, ModelScope id, or a folder
    pools:                                # omit for "auto": everything that fits
      - {kind: cuda, accelerator: H100-80GB, tp: 2, replicas: {min: 1, max: 4}}
      - {kind: ascend, accelerator: 910B2, tp: 4, replicas: {min: 1, max: 8}}
    engine: {max_model_len: 32768, gpu_memory_utilization: 0.9}
    engine_by_kind: {ascend: {additional_config: {a: 1}}}
    slo: {ttft_s: 1.0, itl_s: 0.05}
    idle_timeout_s: 600                   # then to zero; the next request brings it back
    prefer: [ascend, cuda]                # fill in this order, spill over
"""


@pytest.fixture
def written(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "hetero-llm.yaml"
        path.write_text(text)
        return path

    return write


def load(path=None, **options):
    return load_config(path, environ=options.pop("environ", {}), **options)


def complaint(path, **options) -> str:
    with pytest.raises(ConfigInvalid) as caught:
        load(path, **options)
    return str(caught.value)


def test_without_any_source_the_defaults_hold():
    loaded = load()
    assert (loaded.config.gateway.host, loaded.config.gateway.port) == ("127.0.0.1", 8000)
    assert loaded.origins["gateway.port"] == "default"


def test_the_documented_example_is_valid(written):
    model = load(written(DOCUMENTED)).config.models[0]
    assert model.pools[1].accelerator == "910B2"
    assert model.pools[0].replicas.max == 4
    assert model.engine_by_kind == {"ascend": {"additional_config": {"a": 1}}}


def test_environment_wins_over_the_file(written):
    path = written("gateway: {port: 8001, host: 127.0.0.2}")
    loaded = load(path, environ={"HETERO_LLM_GATEWAY__PORT": "8002"})
    assert (loaded.config.gateway.port, loaded.config.gateway.host) == (8002, "127.0.0.2")


def test_flags_win_over_the_environment():
    loaded = load(environ={"HETERO_LLM_GATEWAY__PORT": "8002"}, flags={"gateway.port": 8003})
    assert loaded.config.gateway.port == 8003


def test_a_flag_that_was_not_given_changes_nothing(written):
    assert load(written("gateway: {port: 8001}"), flags={"gateway.port": None}).config.gateway.port == 8001


def test_each_value_knows_where_it_came_from(written):
    path = written("gateway:\n  host: 127.0.0.2\nmodels:\n  - name: a\n")
    loaded = load(path, environ={"HETERO_LLM_GATEWAY__REPLICAS": "1"}, flags={"gateway.port": 1})
    assert loaded.origins["gateway.host"] == f"{path}:2:3"
    assert loaded.origins["models[0].name"] == f"{path}:4:5"
    assert loaded.origins["gateway.replicas"] == "env HETERO_LLM_GATEWAY__REPLICAS"
    assert loaded.origins["gateway.port"] == "flag --port"


def test_variables_of_other_parts_are_not_configuration():
    load(environ={"HETERO_LLM_CACHE_DIR": "/x", "HETERO_LLM_OVERRIDE_CUDA": "count=1"})


@pytest.mark.parametrize(
    ("text", "place", "hint"),
    [
        ("gatway: {port: 1}", "1:1", "did you mean 'gateway'?"),
        ("gateway:\n  prot: 1\n", "2:3", "did you mean 'port'?"),
        (
            "models:\n  - name: a\n    pools:\n      - kind: cpu\n        replica: 2\n",
            "5:9",
            "did you mean 'replicas'?",
        ),
        ("models:\n- name: a\n  engine: {max_model_length: 3}\n", "3:12", "did you mean 'max_model_len'?"),
        ("models:\n- name: a\n  pools: [{kind: cpu, replicas: {minimum: 1}}]\n", "3:34", "did you mean 'min'?"),
    ],
)
def test_an_unknown_key_is_named_with_its_place_and_the_likely_one(written, text, place, hint):
    path = written(text)
    told = complaint(path)
    assert told.startswith(f"{path}:{place}: unknown key ")
    assert told.endswith(hint)


def test_a_key_like_no_other_gets_no_suggestion(written):
    assert "did you mean" not in complaint(written("zzzzzz: 1"))


@pytest.mark.parametrize(
    ("text", "place", "path_text"),
    [
        ("gateway:\n  port: eight\n", "2:3", "gateway.port"),
        ("gateway: {port: 70000}\n", "1:11", "gateway.port"),
        ("models:\n  - source: x\n", "2:5", "models[0].name"),
        ("models:\n  - name: a\n    pools:\n    - {kind: cpu, tp: 0}\n", "4:19", "models[0].pools[0].tp"),
        ("models:\n- name: a\n  engine: {kv_cache_bytes: lots}\n", "3:12", "kv_cache_bytes"),
        ("models:\n- name: a\n  pools:\n  - {kind: cpu, replicas: {min: 3, max: 2}}\n", "4:17", "max 2 is smaller"),
    ],
)
def test_a_wrong_value_is_named_with_its_place(written, text, place, path_text):
    path = written(text)
    told = complaint(path)
    assert told.startswith(f"{path}:{place}: ")
    assert path_text in told


def test_all_complaints_are_told_at_once(written):
    with pytest.raises(ConfigInvalid) as caught:
        load(written("gateway: {prot: 1, hots: x}"))
    assert "prot" in str(caught.value)
    assert "hots" in caught.value.report.cause


def test_a_typo_in_a_variable_is_named_by_the_variable():
    told = complaint(None, environ={"HETERO_LLM_GATEWAY__PROT": "1"})
    assert told == "env HETERO_LLM_GATEWAY__PROT: unknown key 'prot'; did you mean 'port'?"


def test_a_typo_in_a_variables_section_is_named_by_the_variable():
    told = complaint(None, environ={"HETERO_LLM_GATEWY__PORT": "1"})
    assert told == "env HETERO_LLM_GATEWY__PORT: unknown key 'gatewy'; did you mean 'gateway'?"


def test_a_variable_that_is_no_value_is_named():
    assert "HETERO_LLM_GATEWAY__HOST" in complaint(None, environ={"HETERO_LLM_GATEWAY__HOST": "[1"})


def test_two_models_of_one_name_are_refused(written):
    assert "'a' is used twice" in complaint(written("models: [{name: a}, {name: a}]"))


def test_a_key_that_stands_twice_is_refused_with_its_second_place(written):
    path = written("gateway:\n  port: 1\n  port: 2\n")
    assert complaint(path) == f"{path}:3:3: key 'port' stands twice in the same place"


@pytest.mark.parametrize("text", ["- 1\n", "word\n"])
def test_a_file_that_is_no_mapping_is_refused(written, text):
    assert "must be a mapping" in complaint(written(text))


def test_an_empty_file_is_the_defaults(written):
    assert load(written("# nothing\n")).config == load().config


@pytest.mark.parametrize(
    ("text", "place"), [("gateway: {port: 1\n", ":2:1"), ("a: b: c\n", ":1:5"), ("x: !!python/object:os.x 1\n", ":1:4")]
)
def test_a_file_that_is_not_plain_yaml_is_unreadable_at_a_place(written, text, place):
    path = written(text)
    with pytest.raises(ConfigUnreadable) as caught:
        load(path)
    assert f"{path}{place}: " in str(caught.value)


def test_a_list_that_contains_itself_is_unreadable(written):
    with pytest.raises(ConfigUnreadable, match="an alias that stands for itself"):
        load(written("models: &all [*all]\n"))


def test_what_looks_like_a_date_and_is_none_is_refused_at_its_place(written):
    path = written("gateway:\n  host: 2026-99-99\n")
    assert complaint(path) == f"{path}:2:9: '2026-99-99' cannot be read"
    assert "HETERO_LLM_GATEWAY__HOST" in complaint(None, environ={"HETERO_LLM_GATEWAY__HOST": "2026-99-99"})


def test_a_missing_file_is_unreadable(tmp_path):
    with pytest.raises(ConfigUnreadable, match="No such file"):
        load(tmp_path / "none.yaml")


def test_a_binary_file_is_unreadable(tmp_path):
    (tmp_path / "c.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigUnreadable, match="not UTF-8"):
        load(tmp_path / "c.yaml")


def test_relative_paths_in_the_file_are_relative_to_the_file(written):
    path = written("gateway: {api_keys_file: keys.yaml}\nmodels: [{name: a, source: ./m}, {name: b, source: Org/M}]\n")
    config = load(path).config
    assert config.gateway.api_keys_file == path.parent / "keys.yaml"
    assert config.models[0].source == os.fspath(path.parent / "m")
    assert config.models[1].source == "Org/M"


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("1024", 1024), (5, 5), ("1KiB", 1024), ("1.5GiB", 3 << 29), ("2 GB", 2 * 10**9), ("3g", 3 * 10**9), ("1b", 1)],
)
def test_sizes_are_read_with_and_without_units(text, size_bytes):
    assert parse_size_bytes(text) == size_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 XB", "1..5G"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="not a size"):
        parse_size_bytes(text)


def test_the_schema_describes_every_section_and_refuses_others():
    schema = json_schema()
    assert set(schema["properties"]) == {"cluster", "gateway", "models"}
    assert schema["additionalProperties"] is False
