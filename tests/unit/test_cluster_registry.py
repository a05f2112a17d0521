from dataclasses import replace

from hetero_llm.cluster.pools import ConfiguredModel
from hetero_llm.cluster.registry import FAILURES_KEPT, Registry
from hetero_llm.model import ModelEntry, ReplicaState, ReplicaStatus


def model(name="m"):
    return ConfiguredModel(entry=ModelEntry(name=name, source=name, created_unix_s=1))


def status(replica="r1", state=ReplicaState.READY, **changes):
    base = ReplicaStatus(
        replica=replica,
        model="m",
        app="m-cpu-x-tp1",
        kind="cpu",
        accelerator="x",
        node="n",
        state=state,
        started_unix_s=1.0,
        endpoint="127.0.0.1:1234" if state is ReplicaState.READY else None,
    )
    return replace(base, **changes)


def registry_with(*statuses, now=0.0):
    registry = Registry(first_version=1)
    registry.put_model(model())
    for one in statuses:
        registry.renew(one, now)
    return registry


def test_only_ready_replicas_become_targets():
    states = (ReplicaState.STARTING, ReplicaState.DRAINING, ReplicaState.FAILED, ReplicaState.READY)
    table = registry_with(*(status(state.value, state) for state in states)).table()
    assert [target.replica for target in table.targets] == ["ready"]


def test_a_target_carries_the_endpoint_split_into_host_and_port():
    (target,) = registry_with(status(endpoint="[::1]:8000")).table().targets
    assert (target.host, target.port) == ("::1", 8000)


def test_a_model_stays_listed_without_any_replica():
    assert [entry.name for entry in registry_with().table().models] == ["m"]


def test_a_renewal_that_changes_nothing_visible_keeps_the_version():
    registry = registry_with(status())
    before = registry.version
    registry.renew(status(), 1.0)
    assert registry.version == before


def test_a_new_phase_raises_the_version():
    registry = registry_with(status(state=ReplicaState.STARTING, phase="loading"))
    before = registry.version
    registry.renew(status(state=ReplicaState.STARTING, phase="warming up"), 1.0)
    assert registry.version == before + 1


def test_late_leases_alone_remove_nobody():
    registry = registry_with(status("a"), status("b"), now=0.0)
    assert set(registry.late(now=100.0, age_s=1.5)) == {"a", "b"}
    assert {target.replica for target in registry.table().targets} == {"a", "b"}


def test_a_dead_actor_leaves_the_targets_and_is_shown_as_failed():
    registry = registry_with(status("a"), status("b"))
    registry.died("a", "killed by signal 9")
    table = registry.table()
    assert [target.replica for target in table.targets] == ["b"]
    dead = next(r for r in table.replicas if r.replica == "a")
    assert dead.state is ReplicaState.FAILED
    assert dead.error["code"] == "HL406"
    assert dead.error["cause"] == "killed by signal 9"


def test_a_death_noticed_after_its_successor_was_ready_is_forgotten():
    registry = registry_with(status("old"), now=0.0)
    registry.renew(status("new"), 1.0)
    registry.died("old", "killed by signal 9")
    assert [r.replica for r in registry.table().replicas] == ["new"]


def test_a_draining_replica_that_ends_is_forgotten_not_failed():
    registry = registry_with(status("a", ReplicaState.DRAINING))
    registry.died("a", "exit")
    assert registry.table().replicas == ()


def test_the_root_cause_a_replica_reported_is_not_overwritten_by_its_death():
    failed = status("a", ReplicaState.FAILED, error={"code": "HL501", "message": "no such flag"})
    registry = registry_with(failed)
    registry.died("a", "exit")
    assert registry.table().replicas[0].error["code"] == "HL501"


def test_a_replica_that_stopped_is_forgotten():
    registry = registry_with(status("a"))
    registry.renew(status("a", ReplicaState.STOPPED), 1.0)
    assert registry.table().replicas == ()


def test_failures_of_an_application_are_bounded():
    failures = [status(f"f{n}", ReplicaState.FAILED, started_unix_s=float(n)) for n in range(FAILURES_KEPT + 3)]
    kept = registry_with(*failures).table().replicas
    assert [r.replica for r in kept] == [f"f{n}" for n in range(3, FAILURES_KEPT + 3)]


def test_failures_are_forgotten_once_a_successor_is_ready():
    registry = registry_with(status("old", ReplicaState.FAILED), status("new", ReplicaState.STARTING))
    registry.renew(status("new"), 1.0)
    assert [r.replica for r in registry.table().replicas] == ["new"]


def test_removing_a_model_removes_its_replicas_and_its_entry():
    registry = registry_with(status("a"))
    registry.remove_model("m")
    table = registry.table()
    assert (table.models, table.targets, table.replicas) == ((), (), ())


def test_kinds_of_a_model_follow_its_replicas():
    (entry,) = registry_with(status("a"), status("b", kind="sim")).table().models
    assert entry.kinds == ("cpu", "sim")


def test_a_replica_that_was_declared_dead_is_not_heard_any_more():
    registry = Registry(first_version=1)
    registry.put_model(model())
    registry.renew(status("r1", ReplicaState.READY), 0.0)
    registry.died("r1", "its node was lost")
    registry.renew(status("r1", ReplicaState.READY), 1.0)
    assert registry.table().targets == ()
    assert [one.state for one in registry.table().replicas] == [ReplicaState.FAILED]
