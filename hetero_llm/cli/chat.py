"""``hetero-llm chat``: talk to a running model."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from hetero_llm.cli import render
from hetero_llm.cli.options import FiniteRange, Verb
from hetero_llm.errors import ModelNotServed, NotRunning, UpstreamFailed

if TYPE_CHECKING:
    import httpx

READ_TIMEOUT_S = 600.0
Message = dict[str, str]


@click.command(cls=Verb)
@click.argument("model", required=False)
@click.option("--url", metavar="URL", help="Base URL of the endpoint. Default: the one served from this machine.")
@click.option("-m", "--message", metavar="TEXT", help="Ask this and leave; `-` reads it from stdin.")
@click.option("--system", metavar="TEXT", help="System prompt.")
@click.option(
    "--temperature", type=FiniteRange(min=0), metavar="T", help="Sampling temperature. Default: the model's own."
)
@click.option("--max-tokens", type=click.IntRange(min=1), metavar="N", help="Limit of the answer.")
@click.option("--api-key", envvar=["HETERO_LLM_API_KEY", "OPENAI_API_KEY"], metavar="KEY", help="Key of the endpoint.")
def command(
    model: str | None, url: str | None, message: str | None, system: str | None, api_key: str | None, **sampling: Any
) -> int:
    """Talk to a running model. Without --message a conversation; Ctrl-D ends it."""
    import httpx

    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = httpx.Timeout(READ_TIMEOUT_S, connect=5.0)
    with httpx.Client(base_url=(url or _served_url()).rstrip("/"), headers=headers, timeout=timeout) as client:
        try:
            body = {"model": model or _first_model(client), **{k: v for k, v in sampling.items() if v is not None}}
            history = [{"role": "system", "content": system}] if system else []
            if message is not None:
                _turn(client, body, history, sys.stdin.read() if message == "-" else message)
            else:
                _converse(client, body, history)
        except httpx.HTTPError as error:
            raise NotRunning(
                f"{client.base_url} does not answer",
                cause=f"{type(error).__name__}: {error}",
                next=("hetero-llm status", "check --url"),
            ) from error
    return 0


def _served_url() -> str:
    from hetero_llm.cluster.state import live_records

    urls = [record.url for record in live_records() if record.url]
    if len(urls) == 1:
        return urls[0]
    if urls:
        raise NotRunning(f"{len(urls)} endpoints run on this machine; name one", next=tuple(f"--url {u}" for u in urls))
    raise NotRunning("nothing is being served from this machine", next=("hetero-llm serve", "or give --url"))


def _first_model(client: httpx.Client) -> str:
    response = client.get("/v1/models")
    _raise_for_error(response.status_code, response.content)
    models = [str(entry["id"]) for entry in response.json()["data"]]
    if not models:
        raise ModelNotServed(f"{client.base_url} serves no model")
    return models[0]


def _converse(client: httpx.Client, body: dict[str, Any], history: list[Message]) -> None:
    render.say(f"{body['model']} at {client.base_url}; Ctrl-D ends")
    while (text := _ask()) is not None:
        if text.strip():
            _turn(client, body, history, text)


def _ask() -> str | None:
    if sys.stdin.isatty():
        render.say_inline("> ")
    text = sys.stdin.readline()
    return text.rstrip("\n") if text else None


def _turn(client: httpx.Client, body: dict[str, Any], history: list[Message], text: str) -> None:
    """Ask `text` and print the answer as it comes; both become part of the history."""
    history.append({"role": "user", "content": text})
    answer = ""
    for piece in _stream(client, {**body, "messages": history, "stream": True}):
        render.line(piece, end="")
        answer += piece
    render.line()
    history.append({"role": "assistant", "content": answer})


def _stream(client: httpx.Client, body: dict[str, Any]) -> Iterator[str]:
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            _raise_for_error(response.status_code, response.read())
        for text in response.iter_lines():
            if text.startswith("data:") and text != "data: [DONE]":
                yield from _pieces(json.loads(text.removeprefix("data:")))


def _pieces(event: dict[str, Any]) -> Sequence[str]:
    if "error" in event:
        raise UpstreamFailed(f"the answer broke off: {_error_text(event)}", next=("hetero-llm status",))
    return [choice["delta"]["content"] for choice in event.get("choices", ()) if choice["delta"].get("content")]


def _raise_for_error(status: int, content: bytes) -> None:
    if status == 200:
        return
    try:
        text = _error_text(json.loads(content))
    except ValueError:
        text = content[:200].decode(errors="replace")
    steps = ("give --api-key, or set HETERO_LLM_API_KEY",) if status in (401, 403) else ("hetero-llm status",)
    raise UpstreamFailed(f"the endpoint answered {status}: {text}", next=steps)


def _error_text(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message", error)) if isinstance(error, dict) else str(error or body)
