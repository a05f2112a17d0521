"""What a plan needs of a model that is only on the hub: its config.json and an index of its weights, a few kilobytes.

Files are asked for at ``<endpoint>/<org>/<name>/resolve/main/<file>``, the address the hub documents for downloads
(https://huggingface.co/docs/hub/models-downloading). A model without an index has one weights file; of that only the
header is read, by its first bytes (https://huggingface.co/docs/safetensors, "Metadata parsing").
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import httpx

from hetero_llm.errors import UnknownModel
from hetero_llm.models.cache import outlines_dir
from hetero_llm.models.tensors import INDEX_NAME

DEFAULT_ENDPOINT = "https://huggingface.co"
TIMEOUT_S = 10.0
_HEADER_MAX_BYTES = 100_000_000
_SINGLE = "model.safetensors"


def fetch_outline(hub_id: str) -> Path:
    """Return a folder with config.json and an index of the weights of `hub_id`, fetched once and kept.

    ``HF_ENDPOINT``, ``HF_TOKEN`` and ``HF_HUB_OFFLINE`` are honoured.

    Raises:
        UnknownModel: the hub does not have it, does not show it to us, or cannot be reached; the cause says which.
    """
    folder = outlines_dir() / hub_id.replace("/", "--")
    if (folder / INDEX_NAME).is_file():
        return folder
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "yes", "on"}:
        raise _unknown(hub_id, "HF_HUB_OFFLINE is set")
    endpoint = (os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")
    token = os.environ.get("HF_TOKEN")
    headers = {"authorization": f"Bearer {token}"} if token else {}
    base = f"{endpoint}/{hub_id}/resolve/main/"
    try:
        with httpx.Client(base_url=base, headers=headers, timeout=TIMEOUT_S, follow_redirects=True) as client:
            config = _file(client, "config.json")
            index = _file(client, INDEX_NAME, optional=True) or _index_of_header(client)
    except (httpx.HTTPError, ValueError) as error:
        raise _unknown(hub_id, f"{endpoint}: {error or type(error).__name__}") from error
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_bytes(config)
    # Last: a folder with an index is complete.
    draft = folder / f".{INDEX_NAME}.{os.getpid()}"
    draft.write_bytes(index)
    draft.replace(folder / INDEX_NAME)
    return folder


def _file(client: httpx.Client, name: str, *, optional: bool = False) -> bytes:
    """Return a file of the repository; empty when it is `optional` and not there."""
    answer = client.get(name)
    if optional and answer.status_code == httpx.codes.NOT_FOUND:
        return b""
    answer.raise_for_status()
    return answer.content


def _index_of_header(client: httpx.Client) -> bytes:
    """Return an index made from the header of the only weights file."""
    length = int.from_bytes(_part(client, 0, 8), "little")
    if not 0 < length <= _HEADER_MAX_BYTES:
        raise ValueError(f"{_SINGLE} states a header of {length} bytes")
    header = json.loads(_part(client, 8, length))
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    index: dict[str, Any] = {
        "metadata": {"total_size": sum(end - begin for begin, end in (t["data_offsets"] for t in tensors.values()))},
        "weight_map": dict.fromkeys(tensors, _SINGLE),
    }
    return json.dumps(index).encode()


def _part(client: httpx.Client, start: int, count: int) -> bytes:
    """Return some bytes of the weights file. A server that sends the whole file is left after those."""
    received = b""
    with client.stream("GET", _SINGLE, headers={"range": f"bytes={start}-{start + count - 1}"}) as answer:
        answer.raise_for_status()
        skip = 0 if answer.status_code == httpx.codes.PARTIAL_CONTENT else start
        for chunk in answer.iter_bytes():
            received += chunk
            if len(received) >= skip + count:
                break
    part = received[skip : skip + count]
    if len(part) < count:
        raise ValueError(f"{_SINGLE} ended after {len(received)} bytes")
    return part


def _unknown(hub_id: str, cause: str) -> UnknownModel:
    folder = f"./{hub_id.rpartition('/')[2]}"
    return UnknownModel(
        f"{hub_id} is not on this machine, and the hub does not tell about it",
        cause=cause,
        next=("check the id, and HF_TOKEN for a gated model", f"hf download {hub_id} --local-dir {folder}"),
    )
