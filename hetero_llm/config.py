"""hetero-llm.yaml: its shape, and how flags, environment, file and defaults become one configuration.

Precedence: flags > environment (``HETERO_LLM_GATEWAY__PORT``) > file > defaults. Where each value came from is kept.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PositiveInt,
    Tag,
    ValidationError,
    model_validator,
)

from hetero_llm.config_file import ConfigFile, KeyPath, did_you_mean, read_config_file
from hetero_llm.config_layers import dotted, env_layer, file_layer, flag_layer, leaves, put
from hetero_llm.errors import ConfigInvalid

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", re.IGNORECASE)
_SCALE = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_size_bytes(text: str | int) -> int:
    """Return a byte count: ``1073741824``, ``1GiB``, ``1.5 GB`` (GiB is 2**30, GB is 10**9).

    Raises:
        ValueError: not a size.
    """
    match = _SIZE.fullmatch(str(text))
    if match is None:
        raise ValueError(f"{text!r} is not a size; write bytes or a unit, for example 512MiB or 2GiB")
    return int(float(match[1]) * _SCALE[(match[2] or "").lower()])


SizeBytes = Annotated[PositiveInt, BeforeValidator(parse_size_bytes)]


def _shape_of(value: Any) -> str:
    """Choose the one form of a value to check, so that a mistake is told once and in terms of what was meant."""
    if value == "auto":
        return "<auto>"
    return "<range>" if isinstance(value, Mapping | BaseModel) else "<number>"


_Number = Annotated[PositiveInt, Tag("<number>")]
_Auto = Annotated[Literal["auto"], Tag("<auto>")]
CountOrAuto = Annotated[_Number | _Auto, Discriminator(lambda value: _shape_of(value).replace("range", "number"))]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ClusterConfig(_Section):
    """Which Ray cluster."""

    address: str = Field(
        "auto", description="Ray address; local: a new one; auto: RAY_ADDRESS, else a lab or node here, else a new one"
    )


class GatewayConfig(_Section):
    """Where clients connect."""

    host: str = Field("127.0.0.1", description="address to listen on; other than loopback needs keys or --no-auth")
    port: int = Field(8000, ge=0, le=65535, description="TCP port; 0: the operating system chooses")
    grpc_port: int = Field(9000, ge=0, le=65535, description="gRPC port (not served by this version)")
    api_keys_file: Path | None = Field(None, description="file of API keys; without it no key is asked for")
    max_body_bytes: SizeBytes = Field(64 * 2**20, description="largest request body taken")
    replicas: PositiveInt = Field(1, description="gateway processes (this version runs one)")


class ReplicaRange(_Section):
    """How many replicas a pool entry has. This version starts `min` and does not scale by itself."""

    min: int = Field(1, ge=1)
    max: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _ordered(self) -> ReplicaRange:
        if self.max is not None and self.max < self.min:
            raise ValueError(f"max {self.max} is smaller than min {self.min}")
        return self


Replicas = Annotated[_Number | _Auto | Annotated[ReplicaRange, Tag("<range>")], Discriminator(_shape_of)]


class PoolConfig(_Section):
    """One part of a pool: replicas of one kind and shape."""

    kind: str = Field(description="backend kind, for example cuda, ascend, cpu")
    accelerator: str | None = Field(None, description="only this accelerator type, for example 910B2")
    tp: CountOrAuto = Field(1, description="tensor-parallel size")
    pp: PositiveInt = Field(1, description="pipeline-parallel size; left out with tp auto: what is needed")
    replicas: Replicas = Field(1, description="number, auto, or {min, max}")
    labels: dict[str, str] = Field({}, description="labels a node must have, for example {zone: east}")


class EngineConfig(_Section):
    """Engine settings that hold for every kind."""

    max_model_len: PositiveInt | None = Field(None, description="context length in tokens; default: the model's own")
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="share of a device's memory the engine takes")
    kv_cache_bytes: SizeBytes | None = Field(None, description="KV cache per device; default: what the plan leaves")
    start_timeout_s: float = Field(600, gt=0, description="seconds from start to the first generated token")
    args: tuple[str, ...] = Field((), description="engine flags, passed on as they are")


class SloConfig(_Section):
    """Targets in seconds (not used by this version)."""

    ttft_s: float | None = Field(None, gt=0)
    itl_s: float | None = Field(None, gt=0)


class ModelConfig(_Section):
    """One served model."""

    name: str = Field(description="name clients use")
    source: str | None = Field(None, description="alias, hub id or folder; default: the name")
    pools: tuple[PoolConfig, ...] | None = Field(None, description="left out: everything that fits, one replica")
    engine: EngineConfig = EngineConfig()
    engine_by_kind: dict[str, dict[str, Any]] = Field({}, description="engine settings of one kind")
    slo: SloConfig | None = None
    idle_timeout_s: float | None = Field(None, gt=0, description="idle time to zero replicas (not in this version)")
    prefer: tuple[str, ...] = Field((), description="kinds in the order to fill them")


class Config(_Section):
    """The whole of hetero-llm.yaml."""

    cluster: ClusterConfig = ClusterConfig()
    gateway: GatewayConfig = GatewayConfig()
    models: tuple[ModelConfig, ...] = ()

    @model_validator(mode="after")
    def _distinct_names(self) -> Config:
        names = [model.name for model in self.models]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"model name {twice[0]!r} is used twice")
        return self


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration and the origin of each of its values.

    Attributes:
        config: the validated whole.
        origins: ``gateway.port`` to ``flag --port``, ``env HETERO_LLM_GATEWAY__PORT``, ``file:line:col`` or
            ``default``.
    """

    config: Config
    origins: Mapping[str, str]


def load_config(
    path: Path | None, *, flags: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None
) -> Loaded:
    """Merge all sources and check the result.

    Args:
        path: the file; None for none.
        flags: dotted path to value, for example ``{"gateway.port": 8001}``; None values are left out.
        environ: default `os.environ`.

    Raises:
        ConfigUnreadable: see `read_config_file`.
        ConfigInvalid: an unknown key or a wrong value; the message has the place of the first, `cause` the others.
    """
    file = read_config_file(path) if path is not None else None
    layers = [file_layer(file), env_layer(os.environ if environ is None else environ), flag_layer(flags or {})]
    tree: dict[str, Any] = {}
    origins: dict[KeyPath, str] = {}
    for layer in layers:
        for key, value in layer.values.items():
            put(tree, key, value)
        origins.update(layer.origins)
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise _invalid(error, origins, file) from error
    return Loaded(config, _origin_by_leaf(config, origins))


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of hetero-llm.yaml."""
    return Config.model_json_schema()


def _origin_by_leaf(config: Config, origins: Mapping[KeyPath, str]) -> dict[str, str]:
    return {dotted(path): _origin(path, origins) for path, _ in leaves(config.model_dump(mode="json"))}


def _origin(path: KeyPath, origins: Mapping[KeyPath, str]) -> str:
    return origins.get(path, "default")


def _invalid(error: ValidationError, origins: Mapping[KeyPath, str], file: ConfigFile | None) -> ConfigInvalid:
    told = [_complaint(dict(item), origins, file) for item in error.errors()]
    others = "; ".join(told[1:])
    return ConfigInvalid(
        told[0],
        cause=f"also wrong: {others}" if others else None,
        next=("hetero-llm config schema",) if file is None else (f"hetero-llm config check -f {file.path}",),
    )


def _complaint(item: Mapping[str, Any], origins: Mapping[KeyPath, str], file: ConfigFile | None) -> str:
    # pydantic adds the tag of a union's branch to the path; ours are in angle brackets.
    path: KeyPath = tuple(part for part in item["loc"] if not str(part).startswith("<"))
    place = _place(path, origins) or (str(file.path) if file is not None else "configuration")
    if item["type"] == "extra_forbidden":
        return f"{place}: unknown key {str(path[-1])!r}{did_you_mean(path[-1], _known_keys(path[:-1]))}"
    text = str(item["msg"]).removeprefix("Value error, ")
    return f"{place}: {dotted(path)}: {text[:1].lower()}{text[1:]}" if path else f"{place}: {text}"


def _place(path: KeyPath, origins: Mapping[KeyPath, str]) -> str | None:
    enclosing = (path[:length] for length in range(len(path), 0, -1))
    inside = (known for known in origins if known[: len(path)] == path)
    return next((origins[known] for known in (*enclosing, *inside) if known in origins), None)


def _known_keys(path: KeyPath) -> tuple[str, ...]:
    model: type[BaseModel] | None = Config
    for part in path:
        if model is not None and isinstance(part, str) and part in model.model_fields:
            model = _section_in(model.model_fields[part].annotation)
    return tuple(model.model_fields) if model is not None else ()


def _section_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _section_in(part)) is not None), None)
