"""Every failure a user can meet: a type with a code, what happened, why, and what to do next.

Codes are grouped by where the reader should look: HL1xx what was asked for, HL2xx devices and plugins, HL3xx models
and plans, HL4xx the cluster, HL5xx engines, HL6xx requests over HTTP, HL9xx bugs in hetero-llm.
"""

from __future__ import annotations

import dataclasses
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of the command line; part of the interface."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    BUG = 3
    INTERRUPTED = 130


@dataclasses.dataclass(frozen=True, slots=True)
class ErrorReport:
    """An error as plain data: what the terminal, JSON output and log lines all render.

    Attributes:
        code: ``HLnnn``.
        message: what went wrong, naming the thing and the place, in one line.
        cause: why, in one line; None when the message says it all.
        next: commands or actions, most likely first.
        log: path of the log that holds the details; None when there is none.
    """

    code: str
    message: str
    cause: str | None = None
    next: tuple[str, ...] = ()
    log: str | None = None


_CATALOGUE: dict[str, type[HeteroError]] = {}


class HeteroError(Exception):
    """Base of the family. A subclass sets `code`; its docstring is what ``hetero-llm explain`` prints."""

    code: str = "HL900"
    exit_code: ExitCode = ExitCode.FAILURE
    http_status: int = 500
    """Status when the error reaches an HTTP client."""

    def __init__(self, message: str, *, cause: str | None = None, next: tuple[str, ...] = (), log: str | None = None):
        super().__init__(message)
        self.report = ErrorReport(self.code, message, cause, next, log)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        taken = _CATALOGUE.get(cls.code)
        if taken is not None:
            raise TypeError(f"{cls.__name__} and {taken.__name__} both claim {cls.code}")
        _CATALOGUE[cls.code] = cls

    def __reduce__(self) -> tuple[object, tuple[type[HeteroError], ErrorReport]]:
        # Keyword-only arguments are lost by the default reduce; errors cross process boundaries in Ray.
        return (_rebuild, (type(self), self.report))


def _rebuild(cls: type[HeteroError], report: ErrorReport) -> HeteroError:
    return cls(report.message, cause=report.cause, next=report.next, log=report.log)


def error_class(code: str) -> type[HeteroError] | None:
    """Return the error type that owns `code`, or None when nobody does."""
    return _CATALOGUE.get(code)


def from_report(report: ErrorReport) -> HeteroError:
    """Return the typed error of a report that came from another process; unknown codes become InternalError."""
    return _rebuild(_CATALOGUE.get(report.code, InternalError), report)


def all_codes() -> tuple[str, ...]:
    """Return every code in use, ascending."""
    return tuple(sorted(_CATALOGUE))


# -- HL1xx: what was asked for ----------------------------------------------------------------------------------------


class UsageError(HeteroError):
    """The command line asks for something that cannot be meant: flags that exclude each other, a bad value."""

    code = "HL100"
    exit_code = ExitCode.USAGE


class ConfigUnreadable(HeteroError):
    """The configuration file is missing, not readable, or not YAML. The message names line and column if known."""

    code = "HL101"
    exit_code = ExitCode.USAGE


class ConfigInvalid(HeteroError):
    """The configuration has an unknown key or a value of the wrong shape; ``hetero-llm config check`` shows all."""

    code = "HL102"
    exit_code = ExitCode.USAGE


class PortInUse(HeteroError):
    """The address the gateway should listen on belongs to another process."""

    code = "HL103"


class UnsafeBind(HeteroError):
    """A non-loopback address needs an API key, so that nobody publishes an open model by accident."""

    code = "HL104"
    exit_code = ExitCode.USAGE


class KeysUnreadable(HeteroError):
    """The API key file is missing, unreadable, or not in the documented shape."""

    code = "HL105"
    exit_code = ExitCode.USAGE


class FolderUnusable(HeteroError):
    """The folder for records and logs, or the one for device leases, cannot be made, read or written.

    ``HETERO_LLM_STATE_DIR`` and ``HETERO_LLM_LEASE_DIR`` name others.
    """

    code = "HL106"


# -- HL2xx: devices and plugins ---------------------------------------------------------------------------------------


class UnknownKind(HeteroError):
    """No loaded plugin provides this kind; ``hetero-llm plugins list`` shows each plugin and why one failed."""

    code = "HL200"
    exit_code = ExitCode.USAGE


class DiscoveryTimedOut(HeteroError):
    """A backend's device discovery did not answer in time; its devices are not offered, other kinds are."""

    code = "HL202"


class DiscoveryFailed(HeteroError):
    """A backend's device discovery ended with an error; its devices are not offered, other kinds are."""

    code = "HL203"


class OverrideInvalid(HeteroError):
    """A ``HETERO_LLM_OVERRIDE_<KIND>`` variable cannot be read; see ``hetero-llm devices --help`` for its form."""

    code = "HL204"
    exit_code = ExitCode.USAGE


class InventoryInvalid(HeteroError):
    """The file given with ``--inventory`` is not the output of ``hetero-llm devices -o json``."""

    code = "HL205"
    exit_code = ExitCode.USAGE


class DeviceUnusable(HeteroError):
    """A device is present and cannot be used: no driver or library for it, it fell off, or it is not set up."""

    code = "HL206"


class MatrixInvalid(HeteroError):
    """``hardware_matrix.yaml`` of this installation is missing, not in the documented shape, or lacks evidence."""

    code = "HL207"


class PluginNameRefused(HeteroError):
    """``hetero-llm plugins new`` cannot use this name: it is no kind, or a plugin, a package or Python has it."""

    code = "HL211"
    exit_code = ExitCode.USAGE


class PluginFolderExists(HeteroError):
    """``hetero-llm plugins new`` writes into a new folder only; nothing that is there is overwritten."""

    code = "HL212"
    exit_code = ExitCode.USAGE


class ContractNotRun(HeteroError):
    """``hetero-llm plugins check`` could not run the contract tests: pytest is missing, or the tests' process ended."""

    code = "HL213"


# -- HL3xx: models and plans ------------------------------------------------------------------------------------------


class UnknownModel(HeteroError):
    """The name is neither an alias, nor a folder, nor a model that can be had from here."""

    code = "HL301"
    http_status = 404


class ModelFolderInvalid(HeteroError):
    """The model folder lacks something needed to serve it: config.json, weights, or a tokenizer."""

    code = "HL302"


class ModelConversionFailed(HeteroError):
    """Turning the bundled model into the format the engine reads failed, or its hash is not the known one."""

    code = "HL303"


class PlanInfeasible(HeteroError):
    """No placement fits. The refusals name, per node, the rule and both numbers; ``hetero-llm plan`` lists all."""

    code = "HL305"


# -- HL4xx: the cluster -----------------------------------------------------------------------------------------------


class ClusterUnreachable(HeteroError):
    """No Ray cluster answers at the address, or it refused the token."""

    code = "HL401"


class ClusterStartFailed(HeteroError):
    """The local Ray cluster did not come up."""

    code = "HL402"


class NotRunning(HeteroError):
    """The command needs a running deployment and none was found."""

    code = "HL403"


class DeviceBusy(HeteroError):
    """The planned devices are held by another replica; the holder is named."""

    code = "HL404"


class UnknownReplica(HeteroError):
    """No replica has this id or an unambiguous id that starts so."""

    code = "HL405"


class ReplicaLost(HeteroError):
    """A replica's actor ended without saying why, as after kill -9. Ray starts another one."""

    code = "HL406"


class NodeNameTaken(HeteroError):
    """Two living nodes of one cluster have the same name; plans could not tell them apart."""

    code = "HL407"


class NodeUnknown(HeteroError):
    """A Ray node, or a node's name, is not registered with hetero-llm, so its devices are not known."""

    code = "HL408"


class VersionMismatch(HeteroError):
    """Ray takes only nodes with its own version, and with the same Python down to the patch; both are named.

    ``RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL=minor`` lets another patch release of Python in.
    """

    code = "HL409"


class AlreadyRunning(HeteroError):
    """This machine runs a lab, or a node of this name, already; or the cluster serves a model of this name."""

    code = "HL410"


class NodeLost(HeteroError):
    """The Ray processes of a node ended by themselves, or the cluster they belonged to is gone."""

    code = "HL411"


class DrainImpossible(HeteroError):
    """A node cannot be emptied: some of its replicas fit nowhere else. Free devices, or stop a model."""

    code = "HL412"


class ReplicaStuck(HeteroError):
    """A replica does not end: its node may be lost or stuck in a driver."""

    code = "HL413"


# -- HL5xx: engines ---------------------------------------------------------------------------------------------------


class EngineFailed(HeteroError):
    """The engine did not start, or died. The message is the first root cause found in its log."""

    code = "HL501"


class EngineNotReady(HeteroError):
    """The engine answered too late: it lives, but did not generate a token before the deadline."""

    code = "HL502"


class GroupPreflightFailed(HeteroError):
    """The ranks of a group could not meet over the kind's collective backend; the failing rank is named."""

    code = "HL503"


class EngineUnfit(HeteroError):
    """The engine can't run here: its device plugin is for another version of it, or the devices can form no group."""

    code = "HL504"


# -- HL6xx: requests --------------------------------------------------------------------------------------------------


class MalformedRequest(HeteroError):
    """The request body is not valid JSON, or lacks the `model` field."""

    code = "HL601"
    http_status = 400


class ModelNotServed(HeteroError):
    """Nobody configured a model of this name here; ``/v1/models`` lists those that are."""

    code = "HL602"
    http_status = 404


class KeyMissing(HeteroError):
    """The endpoint wants an API key in ``authorization: Bearer``."""

    code = "HL603"
    http_status = 401


class KeyWrong(HeteroError):
    """The API key is not one of the configured keys."""

    code = "HL604"
    http_status = 401


class BodyTooLarge(HeteroError):
    """The request body is larger than the gateway takes; `gateway.max_body_bytes` sets the limit."""

    code = "HL605"
    http_status = 413


class NoReadyReplica(HeteroError):
    """The model is known, but no replica of it is ready at this moment; retry after the given time."""

    code = "HL606"
    http_status = 503


class UpstreamFailed(HeteroError):
    """The replica failed before or while answering, and no other replica could take the request."""

    code = "HL607"
    http_status = 502


class DeadlineExceeded(HeteroError):
    """The request was not finished within ``x-request-timeout-s``."""

    code = "HL608"
    http_status = 408


class NotFound(HeteroError):
    """The path is not one the endpoint has; ``/docs`` lists them."""

    code = "HL609"
    http_status = 404


class MethodNotAllowed(HeteroError):
    """The path exists, but not with this HTTP method."""

    code = "HL610"
    http_status = 405


class UnsupportedRequest(HeteroError):
    """The request asks for a kind or a feature that no replica of the model has."""

    code = "HL612"
    http_status = 400


class HeadTooLarge(HeteroError):
    """The request line and headers together are larger than the gateway takes."""

    code = "HL613"
    http_status = 431


# -- HL9xx: bugs ------------------------------------------------------------------------------------------------------


class InternalError(HeteroError):
    """A bug in hetero-llm. The log has the traceback; please report it."""

    code = "HL901"
    exit_code = ExitCode.BUG
