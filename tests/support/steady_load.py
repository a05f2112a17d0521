"""A steady load of short streamed requests on a gateway, and what became of each of them.

Also a program, for a network namespace of its own: ``python steady_load.py URL MODEL`` writes a line of JSON per
request and ends with its input.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass

import httpx


@dataclass(frozen=True)
class Outcome:
    """How one request ended.

    Attributes:
        kind: "whole", "event" (an error event after the first token), or what else it was.
        replica: who answered, as the header says.
        tokens: text events before the end.
    """

    kind: str
    replica: str | None
    tokens: int


class SteadyLoad:
    """Clients that each send one request after the other until `stop`. Use it as a context."""

    def __init__(self, url: str, model: str, clients: int = 4, tokens: int = 25):
        self.outcomes: list[Outcome] = []
        self._url, self._tokens = url, tokens
        self._body = {"model": model, "max_tokens": tokens, "stream": True, "temperature": 0}
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(clients)]

    def __enter__(self) -> SteadyLoad:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def on_outcome(self, outcome: Outcome) -> None:
        """Called at the end of each request, from several threads."""

    def failures(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.kind != "whole"]

    def replicas(self, last: int) -> Counter[str | None]:
        """Return who answered the last requests."""
        return Counter(outcome.replica for outcome in self.outcomes[-last:])

    def wait_for_more(self, count: int, deadline_s: float = 60.0) -> None:
        """Return when `count` more requests have ended."""
        wanted = len(self.outcomes) + count
        end = time.monotonic() + deadline_s
        while len(self.outcomes) < wanted:
            assert time.monotonic() < end, f"{wanted - len(self.outcomes)} of {count} requests did not end"
            time.sleep(0.05)

    def _run(self, number: int) -> None:
        with httpx.Client(base_url=self._url, timeout=60.0) as client:
            sent = 0
            while not self._stop.is_set():
                sent += 1
                outcome = self._ask(client, f"client {number} request {sent}")
                self.outcomes.append(outcome)
                self.on_outcome(outcome)

    def _ask(self, client: httpx.Client, prompt: str) -> Outcome:
        replica, tokens = None, 0
        try:
            with client.stream("POST", "/v1/completions", json={**self._body, "prompt": prompt}) as answer:
                replica = answer.headers.get("x-hetero-replica")
                if answer.status_code != 200:
                    return Outcome(f"status {answer.status_code}", replica, 0)
                for line in answer.iter_lines():
                    if line == "data: [DONE]":
                        return Outcome("whole" if tokens == self._tokens else "short", replica, tokens)
                    if line.startswith("data: "):
                        event = json.loads(line[6:])
                        if "error" in event:
                            return Outcome("event", replica, tokens)
                        tokens += bool(event["choices"] and event["choices"][0]["text"])
        except httpx.HTTPError as error:
            return Outcome(type(error).__name__, replica, tokens)
        return Outcome("ended without [DONE]", replica, tokens)


class PrintedLoad(SteadyLoad):
    def on_outcome(self, outcome: Outcome) -> None:
        sys.stdout.write(json.dumps(dataclasses.asdict(outcome)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    with PrintedLoad(sys.argv[1], sys.argv[2]):
        sys.stdin.read()
