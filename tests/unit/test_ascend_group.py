"""HCCL groups: addresses, interfaces, time limits and port windows, stated instead of guessed."""

from __future__ import annotations

import socket
from collections.abc import Mapping

import pytest
from hetero_llm_ascend import ports
from hetero_llm_ascend.plugin import AscendBackend

from hetero_llm.plugin import Device, GroupSpec, RankSpec


def device(index: int) -> Device:
    return Device(kind="ascend", accelerator="910B2", uid=f"npu-{index}", index=index)


def spec(*indexes: int, node: str = "npu-a", address: str = "127.0.0.1") -> GroupSpec:
    ranks = tuple(
        RankSpec(rank=rank, node=node, address=address, device=device(index)) for rank, index in enumerate(indexes)
    )
    return GroupSpec(ranks=ranks, tp=len(ranks), pp=1, master_address=address, master_port=29500, deadline_s=12.5)


def two_nodes() -> GroupSpec:
    ranks = (
        RankSpec(rank=0, node="npu-a", address="127.0.0.1", device=device(0)),
        RankSpec(rank=1, node="npu-a", address="127.0.0.1", device=device(1)),
        RankSpec(rank=2, node="npu-b", address="192.0.2.7", device=device(0)),
        RankSpec(rank=3, node="npu-b", address="192.0.2.7", device=device(1)),
    )
    return GroupSpec(ranks=ranks, tp=4, pp=1, master_address="127.0.0.1", master_port=29500)


def env_of(*indexes: int) -> tuple[Mapping[str, str], ...]:
    return AscendBackend().group(spec(*indexes)).rank_env


def test_the_backend_is_hccl_and_nothing_else() -> None:
    assert AscendBackend().group(spec(0, 1)).torch_backend == "hccl"


def test_every_rank_knows_its_number_and_where_rank_0_is() -> None:
    envs = env_of(0, 1, 2, 3)
    assert [env["RANK"] for env in envs] == ["0", "1", "2", "3"]
    assert {env["WORLD_SIZE"] for env in envs} == {"4"}
    assert {(env["MASTER_ADDR"], env["MASTER_PORT"]) for env in envs} == {("127.0.0.1", "29500")}


def test_all_devices_of_the_node_are_visible_ascending_and_each_rank_takes_its_own() -> None:
    envs = env_of(6, 4, 5)
    assert {env["ASCEND_RT_VISIBLE_DEVICES"] for env in envs} == {"4,5,6"}
    assert [env["LOCAL_RANK"] for env in envs] == ["2", "0", "1"]


def test_address_and_interface_are_stated_for_hccl_and_gloo() -> None:
    (env, _) = env_of(0, 1)
    assert env["HCCL_IF_IP"] == "127.0.0.1"
    assert env["HCCL_SOCKET_IFNAME"] == env["GLOO_SOCKET_IFNAME"] == "lo"


def test_time_limits_are_whole_seconds_that_hccl_accepts() -> None:
    (env, _) = env_of(0, 1)
    assert 120 <= int(env["HCCL_CONNECT_TIMEOUT"]) <= 7200
    assert int(env["HCCL_EXEC_TIMEOUT"]) % 68 == 0
    assert 68 <= int(env["HCCL_EXEC_TIMEOUT"]) < 1800


def test_an_error_of_hccl_is_raised_in_the_pre_flight_instead_of_ending_it_without_a_word() -> None:
    for env in env_of(0, 1):
        assert (env["HCCL_BLOCKING_WAIT"], env["TORCH_HCCL_BLOCKING_WAIT"]) == ("1", "1")


def test_what_another_launcher_left_over_does_not_reach_the_ranks() -> None:
    removed = AscendBackend().group(spec(0, 1)).env_remove
    assert {"RANK_TABLE_FILE", "RANK_ID", "HCCL_HOST_SOCKET_PORT_RANGE"} <= set(removed)
    assert not set(removed) & set(env_of(0, 1)[0])


def test_the_preflight_meets_over_hccl_on_npus_within_the_groups_deadline() -> None:
    argv = AscendBackend().group(spec(0, 1)).preflight_argv
    assert argv is not None
    assert argv[1:3] == ("-m", "hetero_llm.plugin.preflight")
    flags = dict(zip(argv[3::2], argv[4::2], strict=True))
    assert flags == {"--backend": "hccl", "--device": "npu", "--import": "torch_npu", "--deadline-s": "12.5"}


def test_one_rank_needs_no_preflight() -> None:
    assert AscendBackend().group(spec(3)).preflight_argv is None


def test_ranks_of_another_node_get_its_address_and_devices_and_no_interface_of_ours() -> None:
    envs = AscendBackend().group(two_nodes()).rank_env
    assert [env["HCCL_IF_IP"] for env in envs] == ["127.0.0.1", "127.0.0.1", "192.0.2.7", "192.0.2.7"]
    assert [env["LOCAL_RANK"] for env in envs] == ["0", "1", "0", "1"]
    assert "HCCL_SOCKET_IFNAME" not in envs[2]
    assert "HCCL_SOCKET_IFNAME" in envs[0]


# -- port windows ------------------------------------------------------------------------------------------------------


def free(_port: int) -> bool:
    return True


def test_the_first_window_begins_where_hccls_own_does() -> None:
    assert ports.base_port(0, free) == 60000


def test_ranks_of_one_replica_on_a_node_share_a_window() -> None:
    envs = env_of(4, 5, 6, 7)
    assert len({env["HCCL_IF_BASE_PORT"] for env in envs}) == 1


def test_replicas_of_one_host_never_share_a_window_even_when_they_choose_at_the_same_moment() -> None:
    bases = [ports.base_port(index, free) for index in range(16)]
    windows = [set(range(base, base + ports.WINDOW_PORTS)) for base in bases]
    assert len(set().union(*windows)) == 16 * ports.WINDOW_PORTS


def test_a_window_with_one_taken_port_is_passed_over() -> None:
    first = ports.base_port(3, free)
    for taken in (first, first + ports.WINDOW_PORTS - 1):
        again = ports.base_port(3, lambda port, taken=taken: port != taken)
        assert taken not in range(again, again + ports.WINDOW_PORTS)
        assert again > first


def test_a_slot_passed_over_does_not_run_into_another_devices_windows() -> None:
    every = {(index, turn) for index in range(32) for turn in range(5)}
    bases = {
        ports.base_port(index, lambda port, turn=turn: port >= 60000 + turn * 32 * ports.WINDOW_PORTS)
        for index, turn in every
    }
    assert len(bases) == len(every)


def test_no_window_leaves_the_range_hccl_accepts() -> None:
    last = max(ports.base_port(index, lambda port: port >= 64096) for index in range(64))
    assert last == ports.LAST_BASE
    assert last <= 65520
    assert last + ports.WINDOW_PORTS - 1 <= 65535


def test_when_everything_is_taken_the_first_window_is_named() -> None:
    assert ports.base_port(2, lambda _port: False) == 60064


def test_a_port_somebody_listens_on_is_not_free() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert not ports.port_is_free("127.0.0.1")(port)


def test_a_port_nobody_has_is_free_and_stays_so() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    is_free = ports.port_is_free("127.0.0.1")
    assert is_free(port)
    assert is_free(port)


@pytest.mark.parametrize("taken", [60000, 60031])
def test_a_replica_really_gets_another_window_while_a_port_of_its_first_is_bound(taken: int) -> None:
    with socket.socket() as holder:
        try:
            holder.bind(("127.0.0.1", taken))
        except OSError:
            pytest.skip(f"port {taken} belongs to another process of this machine")
        base = int(env_of(0, 1)[0]["HCCL_IF_BASE_PORT"])
    assert taken not in range(base, base + ports.WINDOW_PORTS)
