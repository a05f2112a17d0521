"""The file of `hetero-llm lab up`: which nodes a cluster on one machine is to have, and what each pretends to be."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from hetero_llm.config_file import ConfigFile, KeyPath, did_you_mean, read_config_file
from hetero_llm.errors import ConfigInvalid, OverrideInvalid
from hetero_llm.inventory.override import NODE_NAME_ENV, PREFIX, override

_SIM_KIND = "sim"
_SIM_DEVICES_ENV = "HETERO_LLM_SIM_DEVICES"
_SIM_NODE_ENV = "HETERO_LLM_SIM_NODE"
"""The simulated kind has devices of its own; it needs no pretence."""

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$")]
Kind = Annotated[str, Field(pattern=r"^[a-z][a-z0-9]*$")]
Variable = Annotated[str, Field(pattern=r"^[^=\x00]+$")]
Value = Annotated[str, Field(pattern=r"^[^\x00]*$")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LabNode(_Strict):
    """One node.

    Attributes:
        name: unique in the file.
        kind: backend kind.
        devices: as ``HETERO_LLM_OVERRIDE_<KIND>`` takes them (for kind `sim`: ``HETERO_LLM_SIM_DEVICES``); None: what
            this machine really has.
        host: label of the box the node stands for; nodes of one host share it. Default: the node's name.
        labels: more labels, which wishes can ask for.
        env: more variables for the node and everything on it.
    """

    name: Name
    kind: Kind
    devices: Value | None = None
    host: Name | None = None
    labels: Mapping[Name, Name] = {}
    env: Mapping[Variable, Value] = {}

    @field_validator("env", "labels", mode="before")
    @classmethod
    def _numbers_are_text(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: str(item) if isinstance(item, int | float) else item for name, item in value.items()}

    def environ(self, base: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of the node: `base` without what it pretends, then what the file says."""
        own = (PREFIX, _SIM_DEVICES_ENV, _SIM_NODE_ENV, NODE_NAME_ENV)
        environ = {name: value for name, value in base.items() if not name.startswith(own)}
        environ |= {NODE_NAME_ENV: self.name, _SIM_NODE_ENV: self.name}
        if self.devices is not None:
            variable = _SIM_DEVICES_ENV if self.kind == _SIM_KIND else PREFIX + self.kind.upper()
            environ[variable] = self.devices
        return environ | dict(self.env)


class _LabFile(_Strict):
    nodes: tuple[LabNode, ...] = Field(min_length=1)


def load_lab(path: Path) -> tuple[LabNode, ...]:
    """Read the nodes of a lab file, the head first.

    Raises:
        ConfigUnreadable: see `hetero_llm.config_file.read_config_file`.
        ConfigInvalid: an unknown key, a wrong value, a name that stands twice, or devices that cannot be read; the
            message has the place.
    """
    file = read_config_file(path)
    try:
        nodes = _LabFile.model_validate(file.values).nodes
    except ValidationError as error:
        # A misspelt key first: it is why another one is missing.
        items = sorted(error.errors(), key=lambda item: item["type"] != "extra_forbidden")
        told = [_complaint(dict(item), file) for item in items]
        raise ConfigInvalid(
            told[0],
            cause=f"also wrong: {'; '.join(told[1:])}" if told[1:] else None,
            next=("nodes: [{name: gpu-a, kind: cuda, devices: 'count=1,type=H100-80GB,engine=sim'}]",),
        ) from error
    _check_unique(nodes, file)
    _check_devices(nodes, file)
    return nodes


def _check_unique(nodes: tuple[LabNode, ...], file: ConfigFile) -> None:
    seen: set[str] = set()
    for position, node in enumerate(nodes):
        if node.name in seen:
            raise ConfigInvalid(f"{file.place(('nodes', position, 'name'))}: node {node.name!r} stands twice")
        seen.add(node.name)


def _check_devices(nodes: tuple[LabNode, ...], file: ConfigFile) -> None:
    for position, node in enumerate(nodes):
        try:
            override(node.kind, node.environ({}))
        except OverrideInvalid as error:
            key = "devices" if node.devices is not None else "env"
            raise ConfigInvalid(
                f"{file.place(('nodes', position, key))}: {key}: {error.report.cause}",
                next=("devices: 'count=1,type=H100-80GB,engine=sim'",),
            ) from error


def _complaint(item: Mapping[str, Any], file: ConfigFile) -> str:
    path: KeyPath = tuple(item["loc"])
    if item["type"] == "extra_forbidden":
        known = LabNode.model_fields if len(path) > 1 else _LabFile.model_fields
        return f"{file.place(path)}: unknown key {str(path[-1])!r}{did_you_mean(path[-1], known)}"
    if item["type"] == "missing":
        return f"{file.place(path[:-1])}: {str(path[-1])!r} is missing"
    text = str(item["msg"])
    return f"{file.place(path)}: {path[-1]}: {text[:1].lower()}{text[1:]}"
