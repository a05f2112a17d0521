"""What the gateway counts, and how Prometheus reads it.

The event loop adds to plain integers; label sets are only built when somebody scrapes. Counters of a replica vanish
with the replica, so the number of series is bounded by the routing table, whatever clients send.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from hetero_llm.model import Target

LATENCY_BOUNDS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
_TARGET_LABELS = ["model", "kind", "replica"]


class Histogram:
    """Counts of observations in seconds per bucket of `LATENCY_BOUNDS_S`, the last one open."""

    __slots__ = ("counts", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(LATENCY_BOUNDS_S) + 1)
        self.total_s = 0.0

    def observe(self, seconds: float) -> None:
        """Add one observation."""
        self.counts[bisect_left(LATENCY_BOUNDS_S, seconds)] += 1
        self.total_s += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """Return cumulative counts by upper bound, as Prometheus wants them."""
        total = 0
        result: list[tuple[str, float]] = []
        for bound, count in zip((*LATENCY_BOUNDS_S, None), self.counts, strict=True):
            total += count
            result.append(("+Inf" if bound is None else str(bound), total))
        return result


class ReplicaCounters:
    """Everything counted about one replica; the relay holds on to it for the length of a request."""

    __slots__ = ("bytes_in", "bytes_out", "decisions", "failures", "first_token", "labels", "statuses")

    def __init__(self, target: Target, first_token: Histogram) -> None:
        self.labels = (target.model, target.kind, target.replica)
        self.statuses: dict[int, int] = {}
        self.failures: dict[str, int] = {}
        self.decisions = 0
        self.bytes_in = 0
        self.bytes_out = 0
        self.first_token = first_token

    def answered(self, status: int) -> None:
        """Count one request that ended with `status`."""
        self.statuses[status] = self.statuses.get(status, 0) + 1

    def failed(self, reason: str) -> None:
        """Count one failure of the connection or of the answer; `reason` is one of a fixed set of words."""
        self.failures[reason] = self.failures.get(reason, 0) + 1


class GatewayMetrics(Collector):
    """All counters of one gateway process.

    Args:
        in_flight: gives the requests under way per replica id, asked at each scrape.
    """

    def __init__(self, in_flight: Callable[[], Mapping[str, int]]) -> None:
        self._in_flight = in_flight
        self._replicas: dict[str, ReplicaCounters] = {}
        self._first_token: dict[tuple[str, str], Histogram] = {}
        self.refusals: dict[tuple[str, int], int] = {}
        self.retries = 0
        self.reconnects = 0
        self.clients = 0
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def update(self, targets: Iterable[Target]) -> None:
        """Start counting for new replicas, forget those that are gone."""
        kept, self._replicas = self._replicas, {}
        histograms, self._first_token = self._first_token, {}
        for target in targets:
            pair = (target.model, target.kind)
            histogram = self._first_token.setdefault(pair, histograms.get(pair) or Histogram())
            self._replicas[target.replica] = kept.get(target.replica) or ReplicaCounters(target, histogram)

    def of(self, target: Target) -> ReplicaCounters:
        """Return the counters of a replica; those of one that just left the table are counted into the void."""
        return self._replicas.get(target.replica) or ReplicaCounters(target, Histogram())

    def refused(self, code: str, status: int) -> None:
        """Count one request that the gateway itself answered with error `code`."""
        self.refusals[code, status] = self.refusals.get((code, status), 0) + 1

    def exposition(self) -> bytes:
        """Return the text Prometheus scrapes."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield every metric family, as the registry asks for them."""
        yield from self._per_replica()
        yield from self._per_model()
        yield from self._own()

    def _per_replica(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "hetero_llm_requests", "Requests answered by a replica.", labels=[*_TARGET_LABELS, "status"]
        )
        failures = CounterMetricFamily(
            "hetero_llm_upstream_failures", "Failures of a replica's answer.", labels=[*_TARGET_LABELS, "reason"]
        )
        decisions = CounterMetricFamily(
            "hetero_llm_routing_decisions", "Times a replica was chosen.", labels=_TARGET_LABELS
        )
        bytes_in = CounterMetricFamily("hetero_llm_request_bytes", "Request body bytes.", labels=_TARGET_LABELS)
        bytes_out = CounterMetricFamily("hetero_llm_response_bytes", "Response body bytes.", labels=_TARGET_LABELS)
        in_flight = GaugeMetricFamily("hetero_llm_in_flight", "Requests under way.", labels=_TARGET_LABELS)
        under_way = self._in_flight()
        for replica, counters in self._replicas.items():
            labels = list(counters.labels)
            for status, count in counters.statuses.items():
                requests.add_metric([*labels, str(status)], count)
            for reason, count in counters.failures.items():
                failures.add_metric([*labels, reason], count)
            decisions.add_metric(labels, counters.decisions)
            bytes_in.add_metric(labels, counters.bytes_in)
            bytes_out.add_metric(labels, counters.bytes_out)
            in_flight.add_metric(labels, under_way.get(replica, 0))
        yield from (requests, failures, decisions, bytes_in, bytes_out, in_flight)

    def _per_model(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(
            "hetero_llm_time_to_first_token_seconds",
            "From the complete request to the first byte of the answer's body.",
            labels=["model", "kind"],
        )
        for pair, histogram in self._first_token.items():
            family.add_metric(list(pair), histogram.buckets(), histogram.total_s)
        yield family

    def _own(self) -> Iterator[Metric]:
        refusals = CounterMetricFamily(
            "hetero_llm_refusals", "Requests the gateway answered with an error of its own.", labels=["code", "status"]
        )
        for (code, status), count in self.refusals.items():
            refusals.add_metric([code, str(status)], count)
        yield refusals
        yield CounterMetricFamily("hetero_llm_retries", "Requests sent to a second replica.", value=self.retries)
        yield CounterMetricFamily(
            "hetero_llm_reconnects", "Kept connections found closed and opened anew.", value=self.reconnects
        )
        yield GaugeMetricFamily("hetero_llm_client_connections", "Open client connections.", value=self.clients)
