"""Make the served folder of a bundled model: check the source, run the converter, check its result, put it in place."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from hetero_llm.errors import ModelConversionFailed
from hetero_llm.models import cache
from hetero_llm.models.aliases import Alias
from hetero_llm.models.cache import Progress

# Weights, tokenizer, and room for the file system's own needs.
_SPARE_BYTES = 64 << 20


def prepared_folder(alias: Alias, progress: Progress) -> Path:
    """Return the folder of `alias` ready to serve, converting it first if need be. One process converts, others wait.

    Raises:
        ModelConversionFailed: the wheel is missing, a hash is not the pinned one, the cache cannot be written, or
            the converter failed.
    """
    folder = cache.models_dir() / alias.folder_name
    try:
        if cache.is_intact(folder, alias.file_sha256, progress):
            return folder
        with cache.exclusive(alias.name, lambda: progress("waiting for another process that converts", None, None)):
            if not cache.is_intact(folder, alias.file_sha256, progress):
                _convert_into(folder, alias, progress)
    except OSError as error:
        raise ModelConversionFailed(
            f"cannot write {alias.name} to the cache {folder.parent}",
            cause=f"{type(error).__name__}: {error}",
            next=("set HETERO_LLM_CACHE_DIR to a folder you may write",),
        ) from error
    return folder


def _convert_into(folder: Path, alias: Alias, progress: Progress) -> None:
    source = _checked_source(alias, progress)
    _require_space(folder.parent, alias)
    _remove_leftovers(folder)
    work = folder.with_name(f".{alias.folder_name}.{os.getpid()}.tmp")
    log = folder.with_name(f"{alias.name}.convert.log")
    work.mkdir()
    try:
        _run_converter(alias, source, work, log, progress)
        _set_sampling(work, alias)
        hashes = _checked_result(alias, work, progress)
        cache.write_manifest(work, alias.file_sha256, hashes)
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    log.unlink(missing_ok=True)


def _checked_source(alias: Alias, progress: Progress) -> Path:
    path = alias.locate()
    if path is None:
        raise ModelConversionFailed(
            f"the file of {alias.name} is not on this machine",
            cause=f"the package {alias.package} that carries {alias.file} is not installed",
            next=(alias.install,),
        )
    found = cache.sha256_of(path, "checking the bundled file", progress)
    if found != alias.file_sha256:
        raise ModelConversionFailed(
            f"{path} is not the known file of {alias.name}",
            cause=f"its SHA-256 is {found}, expected {alias.file_sha256}",
            next=(f"{alias.install} --force-reinstall",),
        )
    return path


def _require_space(folder: Path, alias: Alias) -> None:
    needed = alias.facts.weights_bytes + _SPARE_BYTES
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ModelConversionFailed(
            f"not enough space in {folder} to convert {alias.name}",
            cause=f"{needed >> 20} MiB are needed, {free >> 20} MiB are free",
            next=("free some space", "set HETERO_LLM_CACHE_DIR to a folder on a larger disk"),
        )


def _remove_leftovers(folder: Path) -> None:
    """Remove a broken result and the work folders of processes that were killed. The caller holds the lock."""
    for path in (folder, *folder.parent.glob(f".{folder.name}.*.tmp")):
        if path.exists():
            shutil.rmtree(path)


def _run_converter(alias: Alias, source: Path, work: Path, log: Path, progress: Progress) -> None:
    argv = [sys.executable, "-m", "hetero_llm.models.convert_gguf", str(source), str(work)]
    # Nothing is fetched, whatever the converter's libraries would like to look up.
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
    with (
        # torch leaves a folder of its own in the temporary one.
        tempfile.TemporaryDirectory(prefix="hetero-") as scratch,
        log.open("w") as stderr,
        subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env={**env, "TMPDIR": scratch},
            process_group=0,
        ) as child,
    ):
        try:
            assert child.stdout is not None
            error = _follow(child.stdout, progress)
            status = child.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
    if status != 0:
        raise ModelConversionFailed(
            f"converting {alias.name} failed",
            cause=error or _last_line(log) or f"the converter ended with status {status}",
            next=(f"look into {log}",),
            log=str(log),
        )


def _set_sampling(work: Path, alias: Alias) -> None:
    path = work / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **alias.sampling}, indent=2) + "\n")


def _follow(stdout: IO[bytes], progress: Progress) -> str | None:
    """Report the converter's progress until it closes its output; return the error it named."""
    error = None
    for line in stdout:
        message = _message(line)
        error = message.get("error", error)
        if "phase" in message:
            progress(message["phase"], message.get("done"), message.get("total"))
    return error


def _message(line: bytes) -> Mapping[str, Any]:
    """Parse one line of the converter; whatever a library prints beside our lines is not a message."""
    try:
        message = json.loads(line)
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}


def _last_line(log: Path) -> str | None:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else None


def _checked_result(alias: Alias, work: Path, progress: Progress) -> Mapping[str, str]:
    hashes = {}
    for path in sorted(work.iterdir()):
        # The converter's libraries make the weights readable for their owner only.
        path.chmod(0o644)
        hashes[path.name] = cache.sha256_of(path, "checking the result", progress)
    for name, expected in alias.converted_sha256.items():
        if hashes.get(name) != expected:
            raise ModelConversionFailed(
                f"the conversion of {alias.name} gave another {name} than it should",
                cause=f"its SHA-256 is {hashes.get(name)}, expected {expected}",
                next=("install the pinned versions: pip install --no-deps -r requirements/cpu.txt",),
            )
    return hashes
