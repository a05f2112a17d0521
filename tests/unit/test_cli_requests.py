"""From flags and configuration to wishes."""

import pytest

from hetero_llm.cli.requests import Choices, model_requests, unsupported_notes
from hetero_llm.config import Config
from hetero_llm.errors import UsageError
from hetero_llm.model import PoolWish

TWO_POOLS = Config.model_validate(
    {
        "models": [
            {
                "name": "a",
                "source": "org/a",
                "pools": [
                    {"kind": "cuda", "tp": 2},
                    {"kind": "ascend", "tp": "auto", "replicas": {"min": 3, "max": 8}},
                ],
                "engine": {"max_model_len": 4096, "kv_cache_bytes": "1GiB", "start_timeout_s": 60, "args": ["--x"]},
                "engine_by_kind": {"ascend": {"y": 1}},
            },
            {"name": "b", "prefer": ["ascend", "cuda"]},
        ]
    }
)


def requests(*sources, config=TWO_POOLS, engine_args=(), **choices):
    return model_requests(sources, config, Choices(**choices), engine_args)


def test_nothing_named_is_the_demo_model_on_the_cpu():
    (request,) = requests(config=Config())
    assert (request.source, request.wishes) == ("smollm2-135m", (PoolWish(kinds=("cpu",)),))


def test_the_demo_model_goes_where_a_flag_says():
    (request,) = requests(config=Config(), kinds=("cuda",))
    assert request.wishes[0].kinds == ("cuda",)


def test_a_named_model_may_use_any_kind():
    (request,) = requests("x", config=Config())
    assert request.wishes == (PoolWish(),)


def test_without_names_every_model_of_the_file_is_served():
    assert [request.name for request in requests()] == ["a", "b"]


def test_a_named_model_of_the_file_keeps_its_settings():
    (request,) = requests("a")
    assert (request.source, request.start_timeout_s, request.engine_args) == ("org/a", 60, ("--x",))
    assert request.engine_options == {"ascend": {"y": 1}}
    first, second = request.wishes
    assert (first.kinds, first.tp, first.replicas, first.max_model_len) == (("cuda",), 2, 1, 4096)
    assert (second.kinds, second.tp, second.replicas, second.kv_cache_bytes) == (("ascend",), None, 3, 2**30)


def test_a_model_without_pools_is_one_wish_with_its_preferences():
    assert requests("b")[0].wishes == (PoolWish(kinds=("ascend", "cuda")),)


def test_a_model_without_source_is_found_by_its_name():
    assert requests("b")[0].source == "b"


def test_a_name_that_is_not_in_the_file_is_a_source():
    (request,) = requests("other")
    assert (request.name, request.source) == (None, "other")


def test_flags_win_over_the_file_in_every_pool():
    wishes = requests("a", max_model_len=128, replicas=2)[0].wishes
    assert [(wish.max_model_len, wish.replicas) for wish in wishes] == [(128, 2), (128, 2)]


def test_kinds_given_as_flags_replace_the_files_pools():
    (wish,) = requests("a", kinds=("cpu",))[0].wishes
    assert (wish.kinds, wish.accelerator) == (("cpu",), None)


def test_auto_means_choose_for_me():
    (wish,) = requests("x", config=Config(), tp="auto", replicas="auto")[0].wishes
    assert (wish.tp, wish.replicas) == (None, None)


def test_a_size_left_to_the_planner_leaves_the_pipeline_to_it_too():
    (wish,) = requests("x", config=Config(), tp="auto")[0].wishes
    assert wish.pp is None


def test_a_pipeline_that_was_given_stays_when_the_size_is_left_to_the_planner():
    (wish,) = requests("x", config=Config(), tp="auto", pp=1)[0].wishes
    assert (wish.tp, wish.pp) == (None, 1)


def test_labels_of_the_command_line_are_added_to_those_of_the_pool():
    pools = [{"kind": "cuda", "labels": {"zone": "east", "host": "a"}}]
    config = Config(models=[{"name": "m", "pools": pools}])
    (wish,) = requests("m", config=config, labels=(("host", "b"),))[0].wishes
    assert wish.labels == {"zone": "east", "host": "b"}


def test_engine_flags_come_after_those_of_the_file():
    assert requests("a", engine_args=("--z",))[0].engine_args == ("--x", "--z")


def test_a_model_named_twice_is_refused():
    with pytest.raises(UsageError, match="named twice"):
        requests("a", "a")


def test_settings_without_effect_are_named():
    notes = unsupported_notes(TWO_POOLS)
    assert notes == ("models.a: this version does not scale; the minimum of each range is started",)
