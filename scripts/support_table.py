"""Write the README's tables of known hardware from hardware_matrix.yaml. A test compares, so they cannot fall behind.

.venv/bin/python scripts/support_table.py
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from hetero_llm.matrix import AcceleratorEntry, Evidence, Level, VersionSet, load_matrix

README = Path(__file__).parents[1] / "README.md"
BEGIN = "<!-- hardware: written by scripts/support_table.py from hardware_matrix.yaml -->"
END = "<!-- /hardware -->"
UNKNOWN = "-"
LEVELS = (Level.VERIFIED, Level.DOCUMENTED, Level.REPORTED)
"""From the best founded to the least."""

SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def tables() -> str:
    """Return both tables, accelerators and engine versions, between the two markers."""
    entries = load_matrix().entries
    hardware = ("kind", "accelerator", "memory", "bandwidth", "bf16", "dtypes", "runs", "founded on")
    software = ("kind", "vllm", "plugin", "torch", "toolkit", "founded on")
    versions = dict.fromkeys((entry.kind, known) for entry in entries for known in entry.versions)
    parts = [
        BEGIN,
        _markdown(hardware, _merged([_hardware(entry) for entry in entries])),
        "Engine versions known to fit together (`plugin`: vLLM's platform plugin, on `cpu` hetero-llm itself):",
        _markdown(software, [_software(kind, known) for kind, known in versions]),
        END,
    ]
    return "\n\n".join(parts)


def with_tables(text: str) -> str:
    """Return `text` with the tables in the place of those it has.

    Raises:
        ValueError: a marker is missing.
    """
    before, begin, rest = text.partition(BEGIN)
    _old, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the text has no {BEGIN} … {END}")
    return before + tables() + after


def _hardware(entry: AcceleratorEntry) -> tuple[str, ...]:
    return (
        entry.kind,
        entry.accelerator,
        _scaled(entry.memory_bytes, 1 << 30, "GiB"),
        _scaled(entry.memory_bandwidth_bytes_per_s, 10**9, "GB/s"),
        _scaled(entry.bf16_flops, 10**12, "TFLOP/s"),
        " ".join(SHORT.get(name, name) for name in entry.dtypes),
        " ".join(sorted(entry.features)) + (f", by {entry.pairing}" if entry.pairing else ""),
        _founded(entry.evidence),
    )


def _software(kind: str, known: VersionSet) -> tuple[str, ...]:
    versions = (known.vllm, known.plugin, known.torch, known.toolkit)
    return (kind, *(version or UNKNOWN for version in versions), _founded(known.evidence))


def _merged(rows: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return the rows with those that differ in the accelerator only put into one."""
    accelerators: dict[tuple[str, ...], list[str]] = {}
    for kind, accelerator, *rest in rows:
        accelerators.setdefault((kind, *rest), []).append(accelerator)
    return [(kind, ", ".join(names), *rest) for (kind, *rest), names in accelerators.items()]


def _scaled(value: int | None, unit: int, name: str) -> str:
    return UNKNOWN if value is None else f"{value / unit:.0f} {name}"


def _founded(evidence: Iterable[Evidence]) -> str:
    levels = {claim.level for claim in evidence}
    return ", ".join(level for level in LEVELS if level in levels)


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    README.write_text(with_tables(README.read_text(encoding="utf-8")), encoding="utf-8")
