"""From what a user wrote to a folder that an engine can load: aliases, folders, and downloads already on the disk."""

from __future__ import annotations

import difflib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from hetero_llm.errors import ModelFolderInvalid, UnknownModel
from hetero_llm.model import ModelFacts
from hetero_llm.models import cache, hub
from hetero_llm.models.aliases import ALIASES, DEFAULT_ALIAS, Alias
from hetero_llm.models.cache import Progress
from hetero_llm.models.convert import prepared_folder
from hetero_llm.models.facts import read_facts
from hetero_llm.models.outline import fetch_outline

__all__ = ["DEFAULT_ALIAS", "ModelListing", "Progress", "ResolvedModel", "list_models", "remove", "resolve", "show"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """A model that can be planned and, when `prepared`, served.

    Attributes:
        name: the name clients use.
        source: what the user wrote.
        path: folder with the files; of a bundled model that is not prepared, where they will be.
        prepared: the files are there.
    """

    name: str
    source: str
    path: Path
    facts: ModelFacts
    prepared: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelListing:
    """One line of ``models list``.

    Attributes:
        origin: ``bundled`` or ``huggingface``.
        path: folder with the files, None when a bundled model is not converted yet.
        disk_bytes: size of that folder, None without one.
        available: it can be served from what is on this machine.
    """

    name: str
    origin: str
    description: str
    path: str | None
    disk_bytes: int | None
    available: bool
    facts: ModelFacts


def resolve(
    model: str, *, progress: Progress | None = None, prepare: bool = True, ask_hub: bool = False
) -> ResolvedModel:
    """Find `model`: an alias, a folder, or the hub id of a model that is already downloaded.

    Args:
        progress: called with (phase, done, total) while a bundled model is converted; done and total are bytes.
        prepare: False gives the facts without converting anything, enough for a plan; of a folder or download it asks
            for no more than config.json and an index of the weights.
        ask_hub: fetch those two of a hub id that is not downloaded; what comes back is not prepared.

    Raises:
        UnknownModel: it is none of these; the error says what was probably meant, or how to get it.
        ModelFolderInvalid: it is a folder that cannot be served; the error names what is missing.
        ModelConversionFailed: a bundled model could not be made ready.
    """
    alias = ALIASES.get(model)
    if alias is not None:
        return _resolve_alias(alias, progress or _silent, prepare)
    path = Path(model).expanduser()
    if path.exists() or _looks_like_path(model):
        path = path.absolute()
        name = path.resolve().name
        facts = read_facts(path, name, model, complete=prepare)
        return ResolvedModel(name=name, source=model, path=path, facts=facts)
    if hub.looks_like_hub_id(model):
        return _resolve_hub_id(model, complete=prepare, ask_hub=ask_hub)
    raise _unknown(model)


def list_models() -> tuple[ModelListing, ...]:
    """Return the models that can be named here: bundled ones, then complete downloads. Broken ones are left out."""
    return (*(_alias_listing(alias) for alias in ALIASES.values()), *_hub_listings())


def show(name: str) -> ModelListing:
    """Return what is known of one model, without converting it.

    Raises:
        UnknownModel, ModelFolderInvalid: as `resolve`.
    """
    alias = ALIASES.get(name)
    if alias is not None:
        return _alias_listing(alias)
    found = resolve(name, prepare=False)
    origin = "huggingface" if found.path.is_relative_to(hub.hub_cache_dir()) else "folder"
    return _listing(found, origin, description=found.facts.architecture)


def remove(name: str) -> int:
    """Remove what the cache holds of a bundled model; return the bytes freed, 0 when it was not converted.

    Raises:
        UnknownModel: it is no bundled model; folders and downloads belong to the user and are not touched.
    """
    alias = ALIASES.get(name)
    if alias is None:
        raise UnknownModel(
            f"{name} is not a model that hetero-llm keeps",
            cause=f"only converted models are removed: {', '.join(ALIASES)}; other folders belong to you",
            next=("hetero-llm models list",),
        )
    if not cache.models_dir().is_dir():
        return 0
    freed = 0
    with cache.exclusive(alias.name, waiting=lambda: None):
        for folder in cache.models_dir().glob(f"{alias.name}-*-r*/"):
            freed += _disk_bytes(folder)
            shutil.rmtree(folder)
    return freed


def _silent(phase: str, done: int | None, total: int | None) -> None:
    """Report to nobody."""


def _resolve_alias(alias: Alias, progress: Progress, prepare: bool) -> ResolvedModel:
    if prepare:
        path = prepared_folder(alias, progress)
        facts = read_facts(path, alias.name, alias.name)
        return ResolvedModel(name=alias.name, source=alias.name, path=path, facts=facts)
    path = cache.models_dir() / alias.folder_name
    prepared = (path / cache.MANIFEST_NAME).is_file()
    facts = replace(alias.facts, path=str(path)) if prepared else alias.facts
    return ResolvedModel(name=alias.name, source=alias.name, path=path, facts=facts, prepared=prepared)


def _looks_like_path(model: str) -> bool:
    return model.startswith(("/", ".", "~")) or model.endswith("/") or model.count("/") > 1


def _resolve_hub_id(model: str, *, complete: bool = True, ask_hub: bool = False) -> ResolvedModel:
    snapshot = hub.find_snapshot(model)
    if snapshot is None and ask_hub:
        outline = fetch_outline(model)
        facts = replace(read_facts(outline, model, model, complete=False), path=None)
        return ResolvedModel(name=model, source=model, path=outline, facts=facts, prepared=False)
    if snapshot is None:
        raise UnknownModel(
            f"{model} is not on this machine",
            cause=f"it looks like a Hugging Face id, and {hub.hub_cache_dir()} holds no download of it",
            next=(
                f"download it: hf download {model} --local-dir ./{model.rpartition('/')[2]}",
                f"then give the folder: hetero-llm serve ./{model.rpartition('/')[2]}",
            ),
        )
    try:
        facts = read_facts(snapshot, model, model, complete=complete)
    except ModelFolderInvalid as error:
        raise ModelFolderInvalid(
            f"the download of {model} is not complete: {error.report.message}",
            cause=error.report.cause,
            next=(f"hf download {model}",),
        ) from error
    return ResolvedModel(name=model, source=model, path=snapshot, facts=facts)


def _unknown(model: str) -> UnknownModel:
    close = difflib.get_close_matches(model.lower(), ALIASES, n=1, cutoff=0.5)
    meant = (f"did you mean {close[0]}?",) if close else ()
    return UnknownModel(
        f"unknown model {model!r}",
        cause=f"it is no alias ({', '.join(ALIASES)}) and there is no such folder",
        next=(*meant, "give a folder with config.json and *.safetensors", "hetero-llm models list"),
    )


def _alias_listing(alias: Alias) -> ModelListing:
    found = _resolve_alias(alias, _silent, prepare=False)
    listing = _listing(found, "bundled", alias.description)
    return replace(listing, available=found.prepared or alias.locate() is not None)


def _hub_listings() -> Iterator[ModelListing]:
    for hub_id in hub.downloaded_ids():
        try:
            found = _resolve_hub_id(hub_id)
        except (ModelFolderInvalid, UnknownModel):
            # Half a download, or a model of a kind that no engine here serves: not an offer.
            continue
        yield _listing(found, "huggingface", description=found.facts.architecture)


def _listing(found: ResolvedModel, origin: str, description: str) -> ModelListing:
    return ModelListing(
        name=found.name,
        origin=origin,
        description=description,
        path=str(found.path) if found.prepared else None,
        disk_bytes=_disk_bytes(found.path) if found.prepared else None,
        available=True,
        facts=found.facts,
    )


def _disk_bytes(folder: Path) -> int:
    return sum(Path(root, name).stat().st_size for root, _, names in os.walk(folder) for name in names)
