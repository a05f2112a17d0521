"""The manager loads real installed distributions; here they are written into a folder on sys.path."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hetero_llm.errors import UnknownKind
from hetero_llm.plugin.manager import PluginManager, PluginRecord, load_plugins

BACKEND = """
from hetero_llm.plugin import Backend, Discovery, hookimpl

class Toy(Backend):
    kind = "{kind}"
    api_version = "{api}"
    def discover(self): return Discovery()
    def versions(self): return {{}}
    def device_env(self, devices): return {{}}
    def group(self, spec): raise NotImplementedError
    def engine(self, spec): raise NotImplementedError
    def check_model(self, facts, accelerator, wish): return ()

@hookimpl
def hetero_llm_backends(): return (Toy(),)
"""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Return a function that installs a plugin distribution from the source of its only module."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def write(name: str, source: str, version: str = "1.2.3") -> None:
        (tmp_path / f"toy_{name}.py").write_text(source)
        info = tmp_path / f"toy_{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: toy-{name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[hetero_llm.backends]\n{name} = toy_{name}\n")

    yield write
    for module in set(sys.modules) - before:
        if module.startswith("toy_"):
            del sys.modules[module]


def toy(kind: str, api: str = "1.0") -> str:
    return BACKEND.format(kind=kind, api=api)


def record(manager: PluginManager, name: str) -> PluginRecord:
    return next(record for record in manager.records() if record.name == name)


def test_the_cpu_backend_is_found_through_its_entry_point() -> None:
    manager = load_plugins()
    assert "cpu" in manager.kinds()
    assert manager.backend("cpu").kind == "cpu"
    assert record(manager, "cpu").distribution == "hetero-llm"


def test_an_installed_plugin_is_listed_with_its_distribution_and_usable(install: Install) -> None:
    install("npu", toy("toynpu"))
    manager = load_plugins()
    assert record(manager, "npu") == PluginRecord(
        name="npu", kind="toynpu", distribution="toy-npu", version="1.2.3", api_version="1.0", status="loaded"
    )
    assert manager.backend("toynpu").kind == "toynpu"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_vendor_library", "ModuleNotFoundError: No module named 'no_such_vendor_library'"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("raise OSError('libvendor.so:\\n  cannot open')", "OSError: libvendor.so: cannot open"),
        ("x = 1", "TypeError: it implements none of the hetero_llm_* hooks"),
        (toy("toy", api="2.0"), "ValueError: written for plugin API 2.0, this hetero-llm has 1.0"),
        (toy("toy", api="1.9"), "ValueError: written for plugin API 1.9, this hetero-llm has 1.0"),
        (toy("toy", api="new"), "ValueError: written for plugin API new, this hetero-llm has 1.0"),
        (toy("Toy-1"), "ValueError: kind 'Toy-1' does not match [a-z][a-z0-9]*"),
        (toy("toy").replace("(Toy(),)", "(Toy,)"), "TypeError: hetero_llm_backends() returned ABCMeta, not a Backend"),
        (toy("toy").replace('kind = "toy"', "pass"), "TypeError: Toy.kind is not set to a string"),
        (toy("toy").replace("(Toy(),)", "1 / 0"), "ZeroDivisionError: division by zero"),
        (toy("toy").replace("backends():", "backends(surprise):"), "PluginValidationError: "),
        (toy("toy").replace("def hetero_llm_backends", "def hetero_llm_backend"), "PluginValidationError: "),
        (toy("toy").replace("def discover", "def discoverx"), "TypeError: Can't instantiate abstract class Toy"),
    ],
)
def test_a_broken_plugin_ends_as_a_record_with_the_reason(install: Install, source: str, reason: str) -> None:
    install("broken", source)
    found = record(load_plugins(), "broken")
    assert found.status == "failed"
    assert found.reason is not None
    assert found.reason.startswith(reason)
    assert "\n" not in found.reason


def test_a_broken_plugin_hides_no_other(install: Install) -> None:
    install("aaa", "import no_such_vendor_library")
    install("npu", toy("toynpu"))
    assert {"cpu", "toynpu"} <= set(load_plugins().kinds())


def test_two_plugins_that_claim_one_kind_are_both_refused_by_name(install: Install) -> None:
    install("first", toy("toynpu"))
    install("second", toy("toynpu"), version="2.0")
    manager = load_plugins()
    assert "toynpu" not in manager.kinds()
    for name in ("first", "second"):
        reason = record(manager, name).reason or ""
        assert "first (toy-first 1.2.3)" in reason
        assert "second (toy-second 2.0)" in reason


def test_a_disabled_plugin_is_not_imported(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("npu", "raise AssertionError('imported')")
    monkeypatch.setenv("HETERO_LLM_DISABLE_PLUGINS", "other, npu")
    found = record(load_plugins(), "npu")
    assert (found.status, found.reason) == ("disabled", "named in HETERO_LLM_DISABLE_PLUGINS")
    assert "toy_npu" not in sys.modules


def test_an_unknown_kind_is_an_error_that_suggests_the_near_one() -> None:
    with pytest.raises(UnknownKind) as caught:
        load_plugins().backend("cpuu")
    assert "did you mean 'cpu'?" in caught.value.report.next


def test_the_error_for_a_kind_whose_plugin_failed_says_why(install: Install) -> None:
    install("npu", "import no_such_vendor_library")
    with pytest.raises(UnknownKind) as caught:
        load_plugins().backend("npu")
    assert "no_such_vendor_library" in (caught.value.report.cause or "")


def test_a_plugin_may_give_hints_checks_and_verbs_without_a_backend(install: Install) -> None:
    install(
        "extras",
        """
import re
import click
from hetero_llm.plugin import Check, RootCausePattern, hookimpl

@hookimpl
def hetero_llm_error_hints(): return [RootCausePattern(pattern=re.compile("E42"), message="forty-two")]

@hookimpl
def hetero_llm_doctor_checks(): return [Check(name="site.licence", ok=True, text="valid")]

@hookimpl
def hetero_llm_cli_commands(): return [click.Command("hello")]
""",
    )
    manager = load_plugins()
    assert (record(manager, "extras").status, record(manager, "extras").kind) == ("loaded", None)
    assert [hint.message for hint in manager.error_hints()] == ["forty-two"]
    assert [verb.name for verb in manager.cli_commands()] == ["hello"]
    (checking,) = (name for name in manager.checking_plugins() if name.endswith(":extras"))
    assert [check.name for check in manager.checks_of(checking)] == ["site.licence"]


def test_nothing_of_a_failed_plugin_is_used(install: Install) -> None:
    hints = "\n@hookimpl\ndef hetero_llm_error_hints(): raise AssertionError('used')\n"
    install("broken", toy("toy", api="9.0") + hints)
    assert load_plugins().error_hints() == ()


def test_doctor_reports_a_failed_plugin_as_a_failed_check(install: Install) -> None:
    install("broken", "import no_such_vendor_library")
    (check,) = (check for check in load_plugins().failed_plugin_checks() if check.name == "plugin.broken")
    assert check.ok is False
    assert "no_such_vendor_library" in check.text
    assert check.next
