"""The Ready block: the last thing `serve` prints, all one needs to use the endpoint."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

QUESTION = "Tell me the capital of France."


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyInfo:
    """What is being served.

    Attributes:
        url: base URL of the gateway.
        models: model name to a word on its replicas, ``2 x cpu tp=1``; None leaves that out.
        has_keys: clients need an API key.
        seconds: from the start of the command to now.
        pid: the supervising process.
        foreground: Ctrl-C in this terminal stops it.
    """

    url: str
    models: Mapping[str, str | None]
    has_keys: bool
    seconds: float
    pid: int
    foreground: bool = True


def ready_data(info: ReadyInfo) -> dict[str, object]:
    """Return the block as data for ``-o json``."""
    return {
        "url": info.url,
        "models": list(info.models),
        "openai_base_url": f"{info.url}/v1",
        "docs": f"{info.url}/docs",
        "metrics": f"{info.url}/metrics",
        "needs_key": info.has_keys,
        "ready_after_s": round(info.seconds, 1),
        "pid": info.pid,
    }


def ready_lines(info: ReadyInfo) -> Sequence[str]:
    """Return the block as lines of text. Nothing is wrapped: the curl line can be pasted."""
    first, key = next(iter(info.models)), "<your key>" if info.has_keys else "none"
    rows = {
        "URL": info.url,
        "models": ", ".join(f"{name} ({text})" if text else name for name, text in info.models.items()),
        "try": curl_line(info.url, first, info.has_keys),
        "OpenAI SDK": f"export OPENAI_BASE_URL={info.url}/v1 OPENAI_API_KEY={key}",
        "docs": f"{info.url}/docs",
        "metrics": f"{info.url}/metrics",
        "keys": "needed: one of the key file" if info.has_keys else "none needed; --api-keys FILE asks for them",
        "stop": ("Ctrl-C, or: " if info.foreground else "") + "hetero-llm stop --all",
    }
    return ("", f"Ready after {info.seconds:.1f} s", "", *(f"  {name:<12}{text}" for name, text in rows.items()), "")


def curl_line(url: str, model: str, has_keys: bool) -> str:
    """Return one line for the shell that asks the model a question."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": QUESTION}]})
    key = "-H 'authorization: Bearer <your key>' " if has_keys else ""
    return f"curl -s {url}/v1/chat/completions {key}-H 'content-type: application/json' -d {shlex.quote(body)}"
