import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_llm.errors import ModelNotServed, NoReadyReplica, UnsupportedRequest
from hetero_llm.model import ModelEntry, ReplicaState, ReplicaStatus, RoutingTable, Target
from hetero_llm.routing.reservation import Outcome
from hetero_llm.routing.router import Router


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def target(name: str, *, model: str = "m", kind: str = "cpu", port: int = 1) -> Target:
    return Target(replica=name, model=model, kind=kind, accelerator="x", host="127.0.0.1", port=port)


def table(*targets: Target, models: tuple[str, ...] = ("m",), replicas: tuple[ReplicaStatus, ...] = ()) -> RoutingTable:
    entries = tuple(ModelEntry(name=name, source=name, created_unix_s=0) for name in models)
    return RoutingTable(version=1, models=entries, targets=targets, replicas=replicas)


def router(*targets: Target, clock: Clock | None = None, limit: int | None = None, **more: object) -> Router:
    made = Router(clock or Clock(), limit)
    made.update(table(*targets, **more))
    return made


def test_an_unknown_model_is_not_served():
    with pytest.raises(ModelNotServed, match="`other`"):
        router(target("a")).choose("other")


def test_the_error_for_an_unknown_model_names_those_served():
    with pytest.raises(ModelNotServed) as caught:
        router(target("a"), models=("m", "n")).choose("other")
    assert caught.value.report.cause == "models served: m, n"


def test_a_known_model_without_replica_is_not_ready():
    with pytest.raises(NoReadyReplica):
        router().choose("m")


def test_a_kind_the_model_never_runs_on_is_unsupported():
    with pytest.raises(UnsupportedRequest, match="`ascend`"):
        router(target("a")).choose("m", kind="ascend")


def test_a_kind_whose_replica_is_only_starting_is_not_ready():
    starting = ReplicaStatus(
        replica="b", model="m", app="", kind="ascend", accelerator="", node="", state=ReplicaState.STARTING,
        started_unix_s=0.0,
    )  # fmt: skip
    with pytest.raises(NoReadyReplica):
        router(target("a"), replicas=(starting,)).choose("m", kind="ascend")


def test_a_pinned_kind_is_kept_to():
    made = router(target("a"), target("b", kind="cuda"))
    assert {made.choose("m", kind="cuda").target.replica for _ in range(5)} == {"b"}


def test_replicas_of_another_model_are_never_chosen():
    made = router(target("a"), target("b", model="n"), models=("m", "n"))
    assert {made.choose("n").target.replica for _ in range(5)} == {"b"}


def test_an_excluded_replica_is_not_chosen():
    made = router(target("a"), target("b"))
    assert {made.choose("m", exclude=("a",)).target.replica for _ in range(5)} == {"b"}


def test_excluding_every_replica_leaves_none_ready():
    with pytest.raises(NoReadyReplica):
        router(target("a")).choose("m", exclude=("a",))


def test_idle_equal_replicas_take_turns():
    made = router(target("a"), target("b"), target("c"))
    order = []
    for _ in range(6):
        reservation = made.choose("m")
        order.append(reservation.target.replica)
        reservation.release(Outcome.OK)
    assert order == ["a", "b", "c", "a", "b", "c"]


def test_the_replica_with_the_least_work_is_chosen():
    made = router(target("a"), target("b"))
    assert made.choose("m", work=100.0).target.replica == "a"
    assert [made.choose("m", work=10.0).target.replica for _ in range(3)] == ["b", "b", "b"]


def test_load_is_counted_at_the_choice():
    made = router(target("a"), target("b"))
    made.choose("m")
    assert made.in_flight() == {"a": 1, "b": 0}


def test_a_full_replica_is_passed_over():
    made = router(target("a"), target("b"), limit=1)
    assert {made.choose("m").target.replica, made.choose("m").target.replica} == {"a", "b"}


def test_a_request_is_refused_only_when_every_replica_is_full():
    made = router(target("a"), target("b"), limit=1)
    made.choose("m"), made.choose("m")
    with pytest.raises(NoReadyReplica):
        made.choose("m")


def test_a_hundred_requests_never_exceed_a_capacity_of_ten():
    made = router(target("a"), target("b"), limit=5)
    granted = 0
    for _ in range(100):
        try:
            made.choose("m")
            granted += 1
        except NoReadyReplica:
            continue
    assert granted == 10
    assert made.in_flight() == {"a": 5, "b": 5}


def test_a_released_place_can_be_taken_again():
    made = router(target("a"), limit=1)
    made.choose("m").release(Outcome.OK)
    assert made.choose("m").target.replica == "a"


def test_a_second_release_does_nothing():
    made = router(target("a"))
    first, _second = made.choose("m"), made.choose("m")
    assert first.release(Outcome.OK)
    assert not first.release(Outcome.OK)
    assert made.in_flight() == {"a": 1}


def test_an_update_keeps_the_bookings_of_replicas_that_stay():
    made = router(target("a"), target("b"))
    made.choose("m", exclude=("b",))
    made.update(table(target("a"), target("c")))
    assert made.in_flight() == {"a": 1, "c": 0}


def test_a_release_after_the_replica_left_touches_nobody_else():
    made = router(target("a"))
    reservation = made.choose("m")
    made.update(table(target("b")))
    assert reservation.release(Outcome.OK)
    assert made.in_flight() == {"b": 0}


def test_a_replica_that_left_gets_nothing():
    made = router(target("a"), target("b"))
    made.update(table(target("b")))
    assert {made.choose("m").target.replica for _ in range(4)} == {"b"}


def test_a_model_that_was_removed_is_not_served():
    made = router(target("a"))
    made.update(table(models=()))
    with pytest.raises(ModelNotServed):
        made.choose("m")


def test_a_replica_that_refused_a_connection_is_avoided():
    made = router(target("a"), target("b"))
    made.choose("m").release(Outcome.UNREACHABLE)
    assert {made.choose("m").target.replica for _ in range(5)} == {"b"}


def test_an_unreachable_replica_gets_one_probe_after_the_cool_down():
    clock = Clock()
    made = router(target("a"), target("b"), clock=clock)
    made.choose("m").release(Outcome.UNREACHABLE)
    clock.now_s += 1.0
    assert [made.choose("m").target.replica for _ in range(4)].count("a") == 1


def test_a_successful_probe_brings_the_replica_back():
    clock = Clock()
    made = router(target("a"), target("b"), clock=clock)
    made.choose("m").release(Outcome.UNREACHABLE)
    clock.now_s += 1.0
    made.choose("m", exclude=("b",)).release(Outcome.OK)
    assert {made.choose("m").target.replica for _ in range(4)} == {"a", "b"}


def test_a_new_endpoint_under_the_same_id_starts_with_a_clean_record():
    made = router(target("a"), target("b"))
    made.choose("m").release(Outcome.UNREACHABLE)
    made.update(table(target("a", port=2), target("b")))
    assert {made.choose("m").target.replica for _ in range(4)} == {"a", "b"}


def test_the_last_replica_is_tried_even_when_it_refused_before():
    made = router(target("a"))
    made.choose("m").release(Outcome.UNREACHABLE)
    assert made.choose("m").target.replica == "a"


def test_a_busy_replica_is_not_taken_for_a_broken_one():
    made = router(target("a"), target("b"))
    for _ in range(10):
        made.choose("m", exclude=("b",)).release(Outcome.BUSY)
    assert {made.choose("m").target.replica for _ in range(4)} == {"a", "b"}


@settings(max_examples=60, deadline=None, database=None)
@given(st.data())
def test_all_counters_return_to_zero_whatever_happens(data):
    clock = Clock()
    made = router(*(target(name) for name in "abc"), clock=clock, limit=4)
    held = []
    for _ in range(data.draw(st.integers(1, 60))):
        clock.now_s += data.draw(st.floats(0, 2))
        move = data.draw(st.sampled_from(["choose", "release", "update"]))
        if move == "choose":
            try:
                held.append(made.choose("m", work=data.draw(st.floats(0.1, 1e4))))
            except NoReadyReplica:
                assert all(count == 4 for count in made.in_flight().values())
        elif move == "release" and held:
            reservation = held.pop(data.draw(st.integers(0, len(held) - 1)))
            reservation.release(data.draw(st.sampled_from(Outcome)))
            reservation.release(data.draw(st.sampled_from(Outcome)))
        elif move == "update":
            made.update(table(*(target(name) for name in data.draw(st.sets(st.sampled_from("abcd"), min_size=1)))))
        assert all(0 <= count <= 4 for count in made.in_flight().values())
    for reservation in held:
        reservation.release(Outcome.OK)
    assert set(made.in_flight().values()) == {0}
    assert all(replica.work == 0.0 for replica in made._replicas.values())


def test_work_is_shared_evenly_among_equal_replicas():
    made = router(*(target(name) for name in "abcd"))
    for work in itertools.islice(itertools.cycle((1.0, 7.0, 3.0, 5.0, 9.0)), 400):
        made.choose("m", work=work)
    shares = [replica.work for replica in made._replicas.values()]
    assert max(shares) - min(shares) <= 9.0


def test_before_the_first_table_a_model_is_not_ready_rather_than_unknown():
    with pytest.raises(NoReadyReplica):
        Router(Clock()).choose("m")
