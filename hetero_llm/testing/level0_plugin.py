"""Level 0: what importing a plugin does, how it is found, and the facts its class states."""

from __future__ import annotations

import re

from hetero_llm.plugin import API_VERSION
from hetero_llm.plugin.manager import load_plugins
from hetero_llm.testing import shapes
from hetero_llm.testing.base import Contract

VISIBLE_ENVS = frozenset(
    ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"),
)
"""Variables with which other vendors' runtimes choose devices; one that is left over misleads an engine."""


class PluginContract(Contract):
    """A plugin can be imported anywhere, is found, and says what it is."""

    def test_importing_the_plugin_works(self) -> None:
        problem = self.observed().errors.get("import")
        assert problem is None, f"importing {self.backend} in a new process failed:\n{problem}"

    def test_importing_the_plugin_loads_no_vendor_library(self) -> None:
        seen = self.observed()
        loaded = (*seen.import_modules, *seen.import_libraries)
        assert not loaded, (
            f"importing {self.backend} loads {', '.join(loaded)}: devices are chosen by variables that are set later; "
            "import it inside the function that needs it"
        )

    def test_importing_the_plugin_changes_no_variable(self) -> None:
        changed = self.observed().import_variables
        assert not changed, f"importing {self.backend} changes {', '.join(changed)} for everybody else"

    def test_the_plugin_is_found_by_its_entry_point_and_loaded(self) -> None:
        kind = self.plugin().kind
        records = load_plugins().records()
        mine = next((record for record in records if record.kind == kind), None)
        failed = "; ".join(f"{record.name}: {record.reason}" for record in records if record.reason)
        assert mine is not None, f"no installed plugin is of kind {kind!r}; install it (pip install -e .); {failed}"
        assert mine.status == "loaded", f"the plugin is {mine.status}: {mine.reason}"

    def test_the_kind_is_a_short_lower_case_word(self) -> None:
        assert re.fullmatch(r"[a-z][a-z0-9]*", self.plugin().kind), f"{self.plugin().kind!r} is not [a-z][a-z0-9]*"

    def test_the_plugin_api_it_was_written_for_is_served_here(self) -> None:
        wanted = self.plugin().api_version
        match = re.fullmatch(r"(\d+)\.(\d+)", wanted)
        assert match, f"api_version {wanted!r} is not MAJOR.MINOR"
        major, minor = (int(part) for part in API_VERSION.split("."))
        served = int(match[1]) == major and int(match[2]) <= minor
        assert served, f"written for plugin API {wanted}, this hetero-llm has {API_VERSION}"

    def test_a_native_resource_is_one_ray_can_count(self) -> None:
        name = self.plugin().native_resource
        if name is not None:
            assert re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name), f"native_resource {name!r} is no name of a resource"
            assert not name.startswith("hetero_"), f"native_resource {name!r}: the counters hetero_* are the core's"
            assert self.plugin().visible_devices_env, f"Ray hands out {name}, but no visible_devices_env takes the ids"

    def test_variables_are_named_and_its_own_is_not_among_those_it_clears(self) -> None:
        backend = self.plugin()
        own = backend.visible_devices_env
        shapes.check_names("other_visible_envs", backend.other_visible_envs)
        shapes.check_names("visible_devices_env", () if own is None else (own,))
        assert own not in backend.other_visible_envs, f"{own} is its own variable and would be cleared"

    def test_the_variables_of_other_vendors_are_cleared(self) -> None:
        backend = self.plugin()
        missing = VISIBLE_ENVS - {backend.visible_devices_env, *backend.other_visible_envs}
        assert not missing, f"other_visible_envs lacks {', '.join(sorted(missing))}"

    def test_the_kv_cache_is_given_in_whole_blocks_and_bytes(self) -> None:
        backend = self.plugin()
        assert type(backend.kv_block_tokens) is int, f"kv_block_tokens is {backend.kv_block_tokens!r}"
        assert backend.kv_block_tokens > 0, f"kv_block_tokens is {backend.kv_block_tokens}"
        default = backend.kv_default_bytes
        assert default is None or default > 0, f"kv_default_bytes is {default}; None takes all memory that is left"
