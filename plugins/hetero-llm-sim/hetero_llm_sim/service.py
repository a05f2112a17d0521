"""The routes of the engine, and the one timer that turns simulated time into tokens on the wire."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from hetero_llm_sim.faults import Faults, FaultsInvalid, parse_faults
from hetero_llm_sim.metrics import Metrics
from hetero_llm_sim.profile import Profile
from hetero_llm_sim.protocol import Exchange
from hetero_llm_sim.replies import Reply, error_body
from hetero_llm_sim.requests import BadRequest, Generate, Limits, read_detokenize, read_generate, read_tokenize
from hetero_llm_sim.scheduler import QueueFull, Scheduler, Sequence
from hetero_llm_sim.tokens import Greedy, decode

VERSION = "0.1.0+sim"
_TICK_S = 0.0005
"""Half a tick of the event loop's timers: a step that ends within it counts as ended."""

_LAST_WORDS_S = 0.005
"""Time between the last byte of a dying engine and its death, so that a client surely gets what it is told it gets."""

_GARBAGE = b'{"id": "chatcmpl-\xff\xfe", "choices": [{"mess'
_encode = msgspec.json.encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What one engine is.

    Attributes:
        profile: of the whole group.
        speed: simulated seconds per real second.
        facts: shown at ``/sim/state``: profile name, devices, ranks.
    """

    profile: Profile
    limits: Limits
    seed: int = 0
    speed: float = 1.0
    prefix_caching: bool = True
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Generation:
    """A request under way: who asked, what to write, and which faults it has."""

    exchange: Exchange
    request: Generate
    reply: Reply
    faults: dict[str, float]
    last_token_s: float = 0.0
    silenced: bool = False


class Service:
    """Answers exchanges. Lives on one event loop; nothing here blocks or awaits."""

    def __init__(self, settings: Settings, faults: Faults, *, die: Callable[[str], None]) -> None:
        """Make the service.

        Args:
            settings: what the engine is.
            faults: those it starts with.
            die: ends the process at once; given a reason.
        """
        self.settings = settings
        self.faults = faults
        self.metrics = Metrics()
        self.scheduler = Scheduler(settings.profile, prefix_caching=settings.prefix_caching)
        self.on_faults: Callable[[Exchange | None], None] = lambda exchange: None
        """Called when the faults have changed, with the exchange that did it."""
        self._die = die
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._armed_s: float | None = None
        self._requests = 0
        self._created_unix_s = int(time.time())
        self._routes: dict[tuple[str, str], Callable[[Exchange], None]] = {
            ("POST", "/v1/chat/completions"): lambda exchange: self._generate(exchange, chat=True),
            ("POST", "/v1/completions"): lambda exchange: self._generate(exchange, chat=False),
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/detokenize"): self._detokenize,
            ("GET", "/v1/models"): self._models,
            ("GET", "/health"): self._health,
            ("GET", "/version"): lambda exchange: exchange.send(200, _encode({"version": VERSION})),
            ("GET", "/metrics"): self._metrics,
            ("GET", "/sim/faults"): self._show_faults,
            ("POST", "/sim/faults"): self._set_faults,
            ("GET", "/sim/state"): self._state,
        }

    def now_s(self) -> float:
        """Return simulated time."""
        return time.monotonic() * self.settings.speed

    def handle(self, exchange: Exchange) -> None:
        """Answer one request, now or when its tokens are due."""
        route = self._routes.get((exchange.method, exchange.path))
        try:
            if route is None:
                known = any(path == exchange.path for _, path in self._routes)
                raise BadRequest("Method Not Allowed" if known else "Not Found", status=405 if known else 404)
            if not self._is_dead_to(exchange):
                route(exchange)
        except BadRequest as error:
            exchange.send(error.status, error_body(str(error), error.kind, error.status, error.param))

    def _is_dead_to(self, exchange: Exchange) -> bool:
        """Tell whether the engine hangs and this is not the request that may still be answered."""
        generates = exchange.path in ("/v1/chat/completions", "/v1/completions")
        if generates or exchange.path.startswith("/sim/") or self._is_on("hang") is None:
            return False
        return exchange.path != "/health" or self._is_on("health_ok") is None

    def _is_on(self, fault: str) -> float | None:
        return self.faults.value_of(fault, time.monotonic())

    # -- generating ----------------------------------------------------------------------------------------------------

    def _generate(self, exchange: Exchange, *, chat: bool) -> None:
        hit = self.faults.for_request(time.monotonic())
        if "hang" in hit:
            return
        if "unavailable" in hit:
            raise BadRequest("the engine is told to be unavailable", status=503, kind="ServiceUnavailableError")
        if "empty" in hit or "garbage" in hit:
            exchange.send(200, b"" if "empty" in hit else _GARBAGE)
            return
        self._start(exchange, read_generate(exchange.body, self.settings.limits, chat=chat), hit)

    def _start(self, exchange: Exchange, request: Generate, hit: dict[str, float]) -> None:
        self.pump()
        self._requests += 1
        greedy = Greedy(request.prompt, self.settings.seed)
        greedy.wrong_from = int(hit["wrong_text"]) if "wrong_text" in hit else None
        generation = Generation(exchange, request, Reply(request, self._requests, int(time.time())), hit)
        sequence = Sequence(list(request.prompt), request.max_tokens, greedy, generation, request.priority)
        try:
            self.scheduler.add(sequence, self.now_s())
        except QueueFull as error:
            self.metrics.refused += 1
            raise BadRequest(f"too many requests: {error}", status=503, kind="ServiceUnavailableError") from error
        exchange.on_close = lambda: self._abort(sequence)
        self._arm()

    def _abort(self, sequence: Sequence) -> None:
        if not sequence.gone:
            self.scheduler.abort(sequence)
            self.metrics.finished["abort"] += 1

    def pump(self) -> None:
        """Deliver what is due by now."""
        now_s, speed = self.now_s(), self.settings.speed
        for step in self.scheduler.advance(now_s + _TICK_S * speed):
            self.metrics.lateness.observe((now_s - step.ends_s) / speed)
            for sequence, count, token in step.emitted:
                self._deliver(sequence, count, token, step.ends_s)

    def _on_timer(self) -> None:
        self._armed_s = None
        self.pump()
        self._arm()

    def _arm(self) -> None:
        next_s = self.scheduler.next_s
        if next_s == self._armed_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._armed_s, self._timer = next_s, None
        if next_s is not None:
            delay_s = max(0.0, (next_s - self.now_s()) / self.settings.speed)
            self._timer = self._loop.call_later(delay_s, self._on_timer)

    def _deliver(self, sequence: Sequence, count: int, token: int, ready_s: float) -> None:
        generation: Generation = sequence.owner
        exchange, request, reply = generation.exchange, generation.request, generation.reply
        first, last = count == 1, count == sequence.max_tokens
        self._observe(sequence, generation, ready_s, first=first, last=last)
        if generation.faults and self._breaks_off(sequence, generation, count):
            return
        if request.stream:
            if first:
                exchange.start_stream()
            chunks = reply.chunks(token, first=first, last=last)
            if last:
                exchange.end_stream(chunks + reply.ending(sequence.cached_tokens or 0))
            else:
                exchange.write(chunks)
        elif last:
            tokens = sequence.tokens[sequence.prompt_length :]
            exchange.send(200, reply.whole(tokens, sequence.cached_tokens or 0))

    def _observe(self, sequence: Sequence, generation: Generation, ready_s: float, *, first: bool, last: bool) -> None:
        speed, metrics = self.settings.speed, self.metrics
        if first:
            metrics.ttft.observe((ready_s - sequence.arrived_s) / speed)
        else:
            metrics.inter_token.observe((ready_s - generation.last_token_s) / speed)
        generation.last_token_s = ready_s
        if last:
            metrics.finished[generation.request.finish_reason] += 1
            metrics.end_to_end.observe((ready_s - sequence.arrived_s) / speed)

    def _breaks_off(self, sequence: Sequence, generation: Generation, count: int) -> bool:
        """Carry out a fault that ends the answer before this token; tell whether it did."""
        faults = generation.faults
        if "die_before_first_byte" in faults or count > faults.get("die_after_tokens", count):
            # What was written in this turn of the loop has not left yet.
            self._loop.call_later(_LAST_WORDS_S, self._die, ", ".join(faults))
            self._abort(sequence)
            generation.silenced = True
        elif count > faults.get("silent_after_tokens", count):
            self._abort(sequence)
            generation.silenced = True
        return generation.silenced

    # -- the other routes ----------------------------------------------------------------------------------------------

    def _tokenize(self, exchange: Exchange) -> None:
        limits = self.settings.limits
        tokens = read_tokenize(exchange.body, limits)
        answer = {"count": len(tokens), "max_model_len": limits.max_model_len, "tokens": tokens, "token_strs": None}
        exchange.send(200, _encode(answer))

    def _detokenize(self, exchange: Exchange) -> None:
        try:
            text = decode(read_detokenize(exchange.body, self.settings.limits))
        except ValueError as error:
            raise BadRequest(str(error), param="tokens") from error
        exchange.send(200, _encode({"prompt": text}))

    def _models(self, exchange: Exchange) -> None:
        common = {
            "object": "model",
            "created": self._created_unix_s,
            "owned_by": "hetero-llm-sim",
            "max_model_len": self.settings.limits.max_model_len,
        }
        models = [{"id": name, "root": name, **common} for name in self.settings.limits.names]
        exchange.send(200, _encode({"object": "list", "data": models}))

    def _health(self, exchange: Exchange) -> None:
        if self._is_on("health_ok") is None and (
            self._is_on("health_fail") is not None or self._is_on("unavailable") is not None
        ):
            exchange.send(503, b"")
        else:
            exchange.send(200, b"")

    def _metrics(self, exchange: Exchange) -> None:
        page = self.metrics.render(self.scheduler, self.settings.limits.names[0])
        exchange.send(200, page.encode(), b"text/plain; version=0.0.4; charset=utf-8")

    def _state(self, exchange: Exchange) -> None:
        _only_from_here(exchange)
        exchange.send(200, _encode({**self.settings.facts, "profile": self.settings.profile}))

    def _show_faults(self, exchange: Exchange) -> None:
        _only_from_here(exchange)
        exchange.send(200, _encode({"faults": self.faults.to_data(time.monotonic())}))

    def _set_faults(self, exchange: Exchange) -> None:
        _only_from_here(exchange)
        try:
            line = msgspec.json.decode(exchange.body, type=dict[str, str]).get("faults", "")
            faults = parse_faults(line, time.monotonic())
            if any(fault.name == "slow_start" for fault in faults.active):
                raise FaultsInvalid("slow_start: the engine has started already")
        except (FaultsInvalid, msgspec.DecodeError) as error:
            raise BadRequest(str(error), param="faults") from error
        self.faults = faults
        self._show_faults(exchange)
        self.on_faults(exchange)


def _only_from_here(exchange: Exchange) -> None:
    if not exchange.from_this_machine:
        raise BadRequest("this route answers the engine's own machine only", status=403, kind="PermissionDeniedError")
