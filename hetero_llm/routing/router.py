"""Chooses the replica for a request: least expected work among those that may take it.

In process and without I/O: the choice and the booking are one step of the event loop, so no second request can see
the place as free. What a replica's unit of work costs is equal for all until capacities are fitted; `_cost` is where
they enter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from hetero_llm.errors import ModelNotServed, NoReadyReplica, UnsupportedRequest
from hetero_llm.model import RoutingTable, Target
from hetero_llm.routing.breaker import Breaker
from hetero_llm.routing.reservation import Outcome, Reservation


class _Replica:
    """What the router books about one replica. Lives on after removal from the table until its requests ended."""

    __slots__ = ("breaker", "in_flight", "last_chosen", "target", "work")

    def __init__(self, target: Target) -> None:
        self.target = target
        self.breaker = Breaker()
        self.in_flight = 0
        self.work = 0.0
        self.last_chosen = 0


class Router:
    """Holds the routing table and every open reservation.

    Args:
        clock: monotonic seconds; injected so that simulations and tests run the same object.
        in_flight_limit: requests one replica may hold at a time, None for no limit.
    """

    def __init__(self, clock: Callable[[], float], in_flight_limit: int | None = None) -> None:
        self._clock = clock
        self._in_flight_limit = in_flight_limit
        self._kinds: dict[str, frozenset[str]] = {}
        self._replicas: dict[str, _Replica] = {}
        self._pools: dict[str, list[_Replica]] = {}
        self._choices = 0
        self._informed = False

    def update(self, table: RoutingTable) -> None:
        """Take over a new table. Bookings of replicas that stay are kept; requests on those that go run on."""
        self._informed = True
        kept = self._replicas
        self._replicas = {}
        self._pools = {entry.name: [] for entry in table.models}
        for target in table.targets:
            replica = kept.get(target.replica)
            if replica is None or replica.target != target:
                replica = _Replica(target)
            self._replicas[target.replica] = replica
            self._pools.setdefault(target.model, []).append(replica)
        configured = {entry.name: set(entry.kinds) for entry in table.models}
        for status in table.replicas:
            configured.setdefault(status.model, set()).add(status.kind)
        self._kinds = {
            model: frozenset(configured.get(model, set()) | {replica.target.kind for replica in pool})
            for model, pool in self._pools.items()
        }

    def choose(
        self, model: str, kind: str | None = None, exclude: Collection[str] = (), work: float = 1.0
    ) -> Reservation:
        """Pick a replica and book the request on it.

        Args:
            model: name the client gave.
            kind: only replicas of this kind.
            exclude: replica ids that were tried already.
            work: expected work of the request, any unit that is the same for all requests.

        Raises:
            ModelNotServed: nobody configured the model.
            UnsupportedRequest: the model never runs on `kind` here.
            NoReadyReplica: no replica may take the request now.
        """
        pool = self._pools.get(model)
        if pool is None:
            raise self._unknown(model)
        now_s = self._clock()
        best = self._best(pool, kind, exclude, work, now_s)
        if best is None:
            raise self._nobody(model, kind)
        return self._book(best, work)

    def in_flight(self) -> Mapping[str, int]:
        """Requests under way per replica in the table."""
        return {name: replica.in_flight for name, replica in self._replicas.items()}

    def _best(
        self, pool: list[_Replica], kind: str | None, exclude: Collection[str], work: float, now_s: float
    ) -> _Replica | None:
        best: _Replica | None = None
        best_rank: tuple[bool, float, int] | None = None
        for replica in pool:
            if not self._may(replica, kind, exclude):
                continue
            # A replica behind an open breaker comes last, yet comes: when every breaker is open, a refused connection
            # costs microseconds and is a better answer than guessing that nobody is there.
            rank = (not replica.breaker.allows(now_s), self._cost(replica, work), replica.last_chosen)
            if best_rank is None or rank < best_rank:
                best, best_rank = replica, rank
        return best

    def _may(self, replica: _Replica, kind: str | None, exclude: Collection[str]) -> bool:
        if kind is not None and replica.target.kind != kind:
            return False
        if self._in_flight_limit is not None and replica.in_flight >= self._in_flight_limit:
            return False
        return replica.target.replica not in exclude

    @staticmethod
    def _cost(replica: _Replica, work: float) -> float:
        return replica.work + work

    def _book(self, replica: _Replica, work: float) -> Reservation:
        self._choices += 1
        replica.last_chosen = self._choices
        replica.in_flight += 1
        replica.work += work
        replica.breaker.begin()

        def release(reservation: Reservation, outcome: Outcome) -> None:
            replica.in_flight -= 1
            # Sums of floats leave dust behind; an idle replica has no work by definition.
            replica.work = replica.work - reservation.work if replica.in_flight else 0.0
            self._learn(replica.breaker, outcome)

        return Reservation(replica.target, work, release)

    def _learn(self, breaker: Breaker, outcome: Outcome) -> None:
        if outcome is Outcome.OK or outcome is Outcome.BUSY:
            breaker.succeed()
        elif outcome is Outcome.UNREACHABLE or outcome is Outcome.FAILED:
            breaker.fail(self._clock(), at_once=outcome is Outcome.UNREACHABLE)
        else:
            breaker.give_up()

    def _unknown(self, model: str) -> ModelNotServed | NoReadyReplica:
        if not self._informed:
            # Only a table can say that nobody configured a model; a gateway that was just started has none yet.
            return NoReadyReplica("The gateway has just started and has no routing table yet.", next=("retry",))
        names = ", ".join(sorted(self._pools)) or "none"
        return ModelNotServed(
            f"The model `{model[:200]}` does not exist here.",
            cause=f"models served: {names}",
            next=("GET /v1/models lists the models served",),
        )

    def _nobody(self, model: str, kind: str | None) -> UnsupportedRequest | NoReadyReplica:
        kinds = self._kinds[model]
        if kind is not None and kind not in kinds:
            return UnsupportedRequest(
                f"The model `{model}` has no replica of kind `{kind[:64]}`.",
                cause=f"kinds it runs on: {', '.join(sorted(kinds)) or 'none yet'}",
                next=("leave out x-hetero-kind, or name one of those kinds",),
            )
        where = f"The model `{model}`" + (f" on kind `{kind}`" if kind else "")
        return NoReadyReplica(
            f"{where} has no replica that can take a request now.",
            cause="its replicas are starting, being replaced, or full",
            next=("retry after the time in the retry-after header", "hetero-llm status shows what the replicas do"),
        )
