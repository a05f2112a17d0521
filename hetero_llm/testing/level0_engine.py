"""Level 0: the command that starts an engine."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from hetero_llm.testing import samples, shapes
from hetero_llm.testing.base import Contract
from hetero_llm.testing.observation import observe_commands

FLAGS = {
    "--host": "127.0.0.1",
    "--port": "8123",
    "--served-model-name": "example-model",
    "--tensor-parallel-size": "2",
    "--max-model-len": "4096",
}
"""What an engine on two devices must be told, in vLLM's names: others read them, a stand-in engine above all."""


class EngineContract(Contract):
    """An engine's command is complete, its own, and leaves other vendors' variables out."""

    def test_the_engines_command_and_patterns_are_in_the_documented_shape(self) -> None:
        launch = self.plugin().engine(samples.engine_spec(self.sample_devices(2)))
        shapes.check_launch(launch)
        assert os.access(launch.argv[0], os.X_OK), f"{launch.argv[0]} cannot be run"

    def test_the_command_says_serve_and_then_the_model(self) -> None:
        argv = self.plugin().engine(samples.engine_spec(self.sample_devices(1))).argv
        assert "serve" in argv, f"the word serve is missing in {argv}"
        after = argv[argv.index("serve") + 1 : argv.index("serve") + 2]
        assert after == ("/models/example",), f"serve must be followed by the model's path, not by {after}"

    @pytest.mark.parametrize("flag", FLAGS)
    def test_the_command_passes_on_what_was_asked(self, flag: str) -> None:
        argv = self.plugin().engine(samples.engine_spec(self.sample_devices(2))).argv
        assert value_of(flag, argv) == FLAGS[flag], f"{flag} {FLAGS[flag]} is not in {argv}"

    def test_the_users_own_flags_come_last_so_that_they_win(self) -> None:
        mine = ("--max-num-seqs", "3", "--seed", "7")
        argv = self.plugin().engine(samples.engine_spec(self.sample_devices(1), extra_args=mine)).argv
        assert argv[-len(mine) :] == mine, f"the command ends with {argv[-len(mine) :]}, not with the user's {mine}"

    def test_settings_of_the_configuration_become_flags(self) -> None:
        options = {"max_num_seqs": 5, "additional_config": {"a": 1}}
        argv = self.plugin().engine(samples.engine_spec(self.sample_devices(1), options=options)).argv
        assert value_of("--max-num-seqs", argv) == "5", f"max_num_seqs of engine_by_kind is not in {argv}"
        assert value_of("--additional-config", argv) == '{"a": 1}', f"additional_config is not in {argv}"

    def test_the_engine_gets_its_devices_variables_and_no_other_vendors(self) -> None:
        backend, devices = self.plugin(), self.sample_devices(2)
        launch = backend.engine(samples.engine_spec(devices))
        missing = dict(backend.device_env(devices).items() - launch.env.items())
        assert not missing, f"the engine lacks what device_env() says: {missing}"
        kept = set(backend.other_visible_envs) - set(launch.env_remove)
        assert not kept, f"env_remove lacks {', '.join(sorted(kept))}"
        strangers = set(backend.other_visible_envs) & set(launch.env)
        assert not strangers, f"the engine is given {', '.join(sorted(strangers))}"

    def test_two_replicas_of_one_node_share_no_device_and_no_port(self) -> None:
        devices = self.sample_devices(4)
        first, second = (
            self.plugin().engine(samples.engine_spec(devices[part], port=port))
            for part, port in ((slice(0, 2), 8123), (slice(2, 4), 8124))
        )
        assert value_of("--port", first.argv) != value_of("--port", second.argv)
        assert dict(first.env) != dict(second.env), "the engines' variables are the same, so they use the same devices"
        own = self.plugin().visible_devices_env
        if own is not None:
            shared = set(first.env[own].split(",")) & set(second.env[own].split(","))
            assert not shared, f"{own} gives both engines {', '.join(sorted(shared))}"

    def test_the_same_engine_asked_twice_has_the_same_command(self) -> None:
        spec = samples.engine_spec(self.sample_devices(2))
        assert self.plugin().engine(spec).argv == self.plugin().engine(spec).argv

    def test_making_the_command_changes_and_loads_nothing(self) -> None:
        seen = observe_commands(self.backend, self.sample_devices(2))
        assert not seen.command_variables, f"making the command sets {', '.join(seen.command_variables)} for the core"
        assert not seen.modules, f"making the command loads {', '.join(seen.modules)} into the core's process"

    @pytest.mark.parametrize("node_rank", [0, 1])
    def test_over_two_nodes_only_the_first_serves_and_each_has_its_own_devices(self, node_rank: int) -> None:
        self.need_capability("spans_nodes")
        backend, devices = self.plugin(), self.sample_devices(4)
        spec = samples.engine_spec(
            devices, node_count=2, node_rank=node_rank, master_address="127.0.0.1", master_port=29_501
        )
        launch = backend.engine(spec)
        assert launch.headless is (node_rank > 0), f"headless is {launch.headless} on node rank {node_rank}"
        assert ("--headless" in launch.argv) is launch.headless, f"node rank {node_rank}: {launch.argv}"
        own = backend.device_env(devices[2 * node_rank : 2 * node_rank + 2])
        missing = dict(own.items() - launch.env.items())
        assert not missing, f"node rank {node_rank} lacks the variables of its own devices: {missing}"


def value_of(flag: str, argv: Sequence[str]) -> str | None:
    """Return the value of the last `flag`, given as ``--flag value`` or ``--flag=value``; None without one."""
    value = None
    for position, word in enumerate(argv):
        if word == flag and position + 1 < len(argv):
            value = argv[position + 1]
        elif word.startswith(f"{flag}="):
            value = word.removeprefix(f"{flag}=")
    return value
