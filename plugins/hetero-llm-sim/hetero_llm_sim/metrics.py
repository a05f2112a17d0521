"""What the engine counts, printed under vLLM's own names, and how late its events came."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator, Sequence

from hetero_llm_sim.scheduler import Scheduler

_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_ITL_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
_E2E_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0)
_LATENESS_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)
_KEPT = 8192


class Histogram:
    """Counts of observations per upper bound, in seconds."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value_s: float) -> None:
        """Add one observation."""
        self._counts[bisect_left(self._bounds, value_s)] += 1
        self._sum += value_s

    def lines(self, name: str, labels: str) -> Iterator[str]:
        """Yield the Prometheus lines of this histogram."""
        yield f"# TYPE {name} histogram"
        total = 0
        for bound, count in zip((*map(repr, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}",{labels}}} {total}'
        yield f"{name}_sum{{{labels}}} {self._sum}"
        yield f"{name}_count{{{labels}}} {total}"


class Lateness:
    """How much later than simulated the ends of steps were acted on: the machine's share in what a client measures."""

    def __init__(self) -> None:
        self.histogram = Histogram(_LATENESS_S)
        self._recent: deque[float] = deque(maxlen=_KEPT)

    def observe(self, late_s: float) -> None:
        """Add one event. Timers tick in milliseconds, so one may be half a millisecond early: that is not late."""
        late_s = max(0.0, late_s)
        self.histogram.observe(late_s)
        self._recent.append(late_s)

    def quantile_s(self, share: float) -> float:
        """Return the quantile over the last events, 0.0 without any."""
        recent = sorted(self._recent)
        return recent[min(len(recent) - 1, int(share * len(recent)))] if recent else 0.0


class Metrics:
    """All counters that are not the scheduler's own."""

    def __init__(self) -> None:
        self.ttft = Histogram(_TTFT_S)
        self.inter_token = Histogram(_ITL_S)
        self.end_to_end = Histogram(_E2E_S)
        self.lateness = Lateness()
        self.finished: Counter[str] = Counter()
        self.refused = 0

    def render(self, scheduler: Scheduler, model: str) -> str:
        """Return the page of ``/metrics``."""
        escaped = model.replace("\\", "\\\\").replace('"', '\\"')
        labels = f'engine="0",model_name="{escaped}"'
        return "\n".join((*self._counts(scheduler, labels), *self._times(labels), ""))

    def _counts(self, scheduler: Scheduler, labels: str) -> Iterator[str]:
        counters, kv = scheduler.counters, scheduler.kv
        yield from _single("vllm:num_requests_running", "gauge", labels, len(scheduler.running))
        yield from _single("vllm:num_requests_waiting", "gauge", labels, scheduler.waiting)
        yield from _single("vllm:kv_cache_usage_perc", "gauge", labels, kv.usage)
        for name, value in (
            ("prefix_cache_queries", counters.prefix_queried_tokens),
            ("prefix_cache_hits", counters.prefix_hit_tokens),
            ("num_preemptions", counters.preemptions),
            ("prompt_tokens", counters.prompt_tokens),
            ("generation_tokens", counters.generated_tokens),
        ):
            yield from _single(f"vllm:{name}_total", "counter", labels, value)
        yield "# TYPE vllm:request_success_total counter"
        for reason in ("stop", "length", "abort"):
            yield f'vllm:request_success_total{{finished_reason="{reason}",{labels}}} {self.finished[reason]}'
        sizes = f'block_size="{kv.block_tokens}",num_gpu_blocks="{kv.total_blocks}"'
        yield from _single("vllm:cache_config_info", "gauge", f"{sizes},{labels}", 1)
        yield from _single("sim:requests_refused_total", "counter", labels, self.refused)
        yield from _single("sim:steps_total", "counter", labels, counters.steps)

    def _times(self, labels: str) -> Iterator[str]:
        yield from self.ttft.lines("vllm:time_to_first_token_seconds", labels)
        yield from self.inter_token.lines("vllm:inter_token_latency_seconds", labels)
        yield from self.end_to_end.lines("vllm:e2e_request_latency_seconds", labels)
        yield from self.lateness.histogram.lines("sim:event_lateness_seconds", labels)
        yield "# TYPE sim:event_lateness_recent_seconds gauge"
        for share in (0.5, 0.99, 1.0):
            late_s = self.lateness.quantile_s(share)
            yield f'sim:event_lateness_recent_seconds{{quantile="{share}",{labels}}} {late_s}'


def _single(name: str, kind: str, labels: str, value: float) -> Iterator[str]:
    yield f"# TYPE {name} {kind}"
    yield f"{name}{{{labels}}} {value}"
