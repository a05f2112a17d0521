"""Run the doctor's checks of plugins, each in a process of its own with a deadline.

Checks look at drivers, and a sick driver hangs or kills who looks: that is one failing check which names it, and the
others answer as if nothing had been. The child is this module, run with ``python -m``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import msgspec

from hetero_llm.inventory.asking import Said, answer_stream, ask
from hetero_llm.plugin import Check
from hetero_llm.plugin.manager import load_plugins

DEADLINE_S = 10.0


def plugin_checks(
    kinds: Iterable[str], plugins: Iterable[str] = (), deadline_s: float = DEADLINE_S
) -> tuple[Check, ...]:
    """Run the checks of the backends of `kinds`, and those of `plugins` that belong to no kind; all at the same time.

    Args:
        plugins: of `PluginManager.checking_plugins`.
        deadline_s: for each, from the common start.

    Returns:
        The checks in the order asked for. Never raises for what a plugin does: one that raises, crashes or does not
        answer in time has one failing check.
    """
    module = (sys.executable, "-m", "hetero_llm.inventory.checkup")
    programs = {f"{kind}.doctor": (*module, "kind", kind) for kind in kinds}
    programs |= {f"{plugin}.doctor": (*module, "plugin", plugin) for plugin in plugins}
    answers = ask(programs, deadline_s)
    return tuple(check for name, said in answers.items() for check in _checks(name, said, deadline_s))


def _checks(name: str, said: Said, deadline_s: float) -> tuple[Check, ...]:
    try:
        return said.answer(tuple[Check, ...], deadline_s)
    except TimeoutError as error:
        advice = "dmesg | tail   # what the kernel says of that hardware"
        return (Check(name=name, ok=False, text=f"the check itself {error}", next=(advice,)),)
    except ValueError as error:
        advice = "hetero-llm plugins list   # whose it is"
        return (Check(name=name, ok=False, text=f"the check itself failed: {error}", next=(advice,)),)


def main(what: str, name: str) -> None:
    """Print the checks of a ``kind`` or a ``plugin`` as JSON."""
    with answer_stream() as answer:
        manager = load_plugins()
        checks = manager.backend(name).doctor() if what == "kind" else manager.checks_of(name)
        answer.write(msgspec.json.encode(tuple(checks)))


if __name__ == "__main__":
    main(*sys.argv[1:])
