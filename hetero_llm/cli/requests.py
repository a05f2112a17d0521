"""What is asked for: models from the command line and the configuration, as wishes the planner takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from hetero_llm.errors import UsageError
from hetero_llm.model import PoolWish

if TYPE_CHECKING:
    from hetero_llm.config import Config, ModelConfig, PoolConfig

DEMO_KIND = "cpu"
"""Kind of the demo model when nobody names one: asked for by naming no model at all, so no silent fallback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The layout flags of `serve` and `plan`. None (or empty) is *not given*; ``auto`` is *choose for me*."""

    tp: int | str | None = None
    pp: int | None = None
    replicas: int | str | None = None
    kinds: tuple[str, ...] = ()
    accelerator: str | None = None
    max_model_len: int | None = None
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    labels: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Choices:
        """Return the choices among a command's parameters."""
        return cls(**{field.name: given[field.name] for field in fields(cls) if field.name in given})

    def over(self, wish: PoolWish) -> PoolWish:
        """Return `wish` with the flags that were given."""
        changes: dict[str, Any] = {}
        for name in ("accelerator", "pp", "max_model_len", "kv_cache_bytes", "gpu_memory_utilization"):
            if getattr(self, name) is not None:
                changes[name] = getattr(self, name)
        for name in ("tp", "replicas"):
            if getattr(self, name) is not None:
                changes[name] = auto_is_none(getattr(self, name))
        if self.tp == "auto" and self.pp is None and wish.pp == 1:
            # Whoever leaves the size to the planner wants a pipeline rather than no place at all.
            changes["pp"] = None
        if self.kinds:
            changes["kinds"] = self.kinds
        if self.labels:
            changes["labels"] = {**wish.labels, **dict(self.labels)}
        return replace(wish, **changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """One model to serve.

    Attributes:
        name: name clients use; None: the one its source gives.
        source: alias, hub id or folder.
        wishes: one per pool entry; all of them must fit.
        engine_args: engine flags for every kind.
        engine_options: kind to engine settings of that kind.
        start_timeout_s: seconds from start to the first generated token.
    """

    name: str | None
    source: str
    wishes: tuple[PoolWish, ...]
    engine_args: tuple[str, ...] = ()
    engine_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    start_timeout_s: float = 600.0


def auto_is_none(count: int | str) -> int | None:
    """Return a number, or None for ``auto``."""
    return None if isinstance(count, str) else count


def model_requests(
    sources: tuple[str, ...], config: Config, choices: Choices, engine_args: tuple[str, ...] = ()
) -> tuple[ModelRequest, ...]:
    """Return the models to serve: those named, else those of the file, else the demo model.

    A named model that the file describes keeps the file's settings; flags that were given win over them.

    Raises:
        UsageError: a model is named twice.
    """
    if len(set(sources)) < len(sources):
        raise UsageError(f"a model is named twice: {' '.join(sources)}")
    described = {model.name: model for model in config.models}
    if not sources and not described:
        demo = _plain_request(_demo_alias(), PoolWish(kinds=(DEMO_KIND,)))
        return (_with_flags(demo, choices, engine_args),)
    chosen = [described.get(source, source) for source in sources] or list(described.values())
    requests = [
        _plain_request(item, PoolWish()) if isinstance(item, str) else _configured_request(item) for item in chosen
    ]
    return tuple(_with_flags(request, choices, engine_args) for request in requests)


def _demo_alias() -> str:
    from hetero_llm.models.store import DEFAULT_ALIAS

    return DEFAULT_ALIAS


def _plain_request(source: str, wish: PoolWish) -> ModelRequest:
    return ModelRequest(name=None, source=source, wishes=(wish,))


def _with_flags(request: ModelRequest, choices: Choices, engine_args: tuple[str, ...]) -> ModelRequest:
    # --kind replaces the file's division into kinds: what is asked for is one pool on those kinds.
    wishes = request.wishes[:1] if choices.kinds else request.wishes
    return replace(
        request,
        wishes=tuple(choices.over(wish) for wish in wishes),
        engine_args=request.engine_args + engine_args,
    )


def _configured_request(model: ModelConfig) -> ModelRequest:
    engine = model.engine
    common = PoolWish(
        kinds=model.prefer,
        max_model_len=engine.max_model_len,
        kv_cache_bytes=engine.kv_cache_bytes,
        gpu_memory_utilization=engine.gpu_memory_utilization,
    )
    return ModelRequest(
        name=model.name,
        source=model.source or model.name,
        wishes=tuple(_pool_wish(pool, common) for pool in model.pools) if model.pools else (common,),
        engine_args=engine.args,
        engine_options=model.engine_by_kind,
        start_timeout_s=engine.start_timeout_s,
    )


def _pool_wish(pool: PoolConfig, common: PoolWish) -> PoolWish:
    replicas = pool.replicas
    return replace(
        common,
        kinds=(pool.kind,),
        accelerator=pool.accelerator,
        tp=auto_is_none(pool.tp),
        pp=None if pool.tp == "auto" and "pp" not in pool.model_fields_set else pool.pp,
        labels=pool.labels,
        replicas=auto_is_none(replicas) if isinstance(replicas, int | str) else replicas.min,
    )


def unsupported_notes(config: Config) -> tuple[str, ...]:
    """Return a line per setting that this version reads but does not act on, so that nothing is ignored silently."""
    notes = []
    if "grpc_port" in config.gateway.model_fields_set:
        notes.append("gateway.grpc_port is set, but this version serves no gRPC")
    if config.gateway.replicas > 1:
        notes.append(f"gateway.replicas is {config.gateway.replicas}, but this version runs one gateway")
    for model in config.models:
        notes += [
            f"models.{model.name}.{name} is set, but this version does not act on it"
            for name in ("slo", "idle_timeout_s")
            if getattr(model, name) is not None
        ]
        ranges = [pool.replicas for pool in model.pools or () if not isinstance(pool.replicas, int | str)]
        if any(item.max not in (None, item.min) for item in ranges):
            notes.append(f"models.{model.name}: this version does not scale; the minimum of each range is started")
    return tuple(notes)
