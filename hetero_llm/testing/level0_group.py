"""Level 0: how the ranks of a replica find each other."""

from __future__ import annotations

import os

import pytest

from hetero_llm.plugin import GroupSetup
from hetero_llm.testing import samples, shapes
from hetero_llm.testing.base import Contract


class GroupContract(Contract):
    """A group's set-up is complete: one environment per rank, one collective library, one pre-flight program."""

    @pytest.mark.parametrize(("ranks", "nodes"), [(1, 1), (2, 1), (4, 2)])
    def test_every_rank_is_told_who_it_is_and_where_to_meet(self, ranks: int, nodes: int) -> None:
        setup = self._setup(ranks, nodes)
        assert isinstance(setup, GroupSetup), f"group() gave {type(setup).__name__}, not GroupSetup"
        assert len(setup.rank_env) == ranks, f"{len(setup.rank_env)} environments for {ranks} ranks"
        for rank, env in enumerate(setup.rank_env):
            shapes.check_env(f"the variables of rank {rank}", env)
            wanted = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank % (ranks // nodes)),
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "29500",
            }
            given = {name: env.get(name) for name in wanted}
            assert given == wanted, f"rank {rank} of {ranks} on {nodes} nodes gets {given}, needs {wanted}"

    @pytest.mark.parametrize(("ranks", "nodes"), [(2, 1), (4, 2)])
    def test_no_rank_is_given_a_variable_of_another_vendor(self, ranks: int, nodes: int) -> None:
        others = set(self.plugin().other_visible_envs)
        for env in self._setup(ranks, nodes).rank_env:
            assert not others & set(env), f"a rank gets {', '.join(sorted(others & set(env)))}"

    def test_the_collective_library_is_named_and_the_same_for_every_shape(self) -> None:
        names = {self._setup(ranks, nodes).torch_backend for ranks, nodes in ((1, 1), (2, 1), (4, 2))}
        for name in names:
            shapes.check_line("torch_backend", name)
        assert len(names) == 1, f"torch_backend is {', '.join(sorted(names))}: a slower one may never step in silently"

    def test_variables_to_remove_are_named(self) -> None:
        shapes.check_names("env_remove of the group", self._setup(2, 1).env_remove)

    def test_one_rank_needs_no_pre_flight(self) -> None:
        assert self._setup(1, 1).preflight_argv is None, "one rank has nobody to meet"

    def test_several_ranks_are_tried_out_by_a_program_before_the_engine_starts(self) -> None:
        self.need_capability("forms_groups")
        argv = self._setup(2, 1).preflight_argv
        assert argv is not None, (
            "no pre-flight for two ranks; a backend whose ranks never meet declares forms_groups = False"
        )
        shapes.check_argv("the pre-flight's command", argv)
        assert os.access(argv[0], os.X_OK), f"{argv[0]} cannot be run"

    def test_the_pre_flight_is_told_its_deadline(self) -> None:
        self.need_capability("forms_groups")
        spec = samples.group_spec(self.sample_devices(2), deadline_s=17.0)
        argv = self.plugin().group(spec).preflight_argv or ()
        assert any(word in ("17", "17.0", "--deadline-s=17", "--deadline-s=17.0") for word in argv), (
            f"a deadline of 17 s is nowhere in {argv}: a pre-flight that hangs must end itself"
        )

    def _setup(self, ranks: int, nodes: int) -> GroupSetup:
        return self.plugin().group(samples.group_spec(self.sample_devices(ranks), nodes))
