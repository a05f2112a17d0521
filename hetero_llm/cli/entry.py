"""From argv to an exit code: run the verb, and turn every way it can end into the interface's codes and error shape."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Sequence

import click

from hetero_llm.cli import render
from hetero_llm.cli.group import PROGRAM, cli
from hetero_llm.errors import ExitCode, FolderUnusable, HeteroError, InternalError, UsageError


def run(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code. Prints errors; never raises for what a user did."""
    output = wanted_format(argv)
    try:
        return _invoke(argv)
    except click.exceptions.NoArgsIsHelpError as error:
        render.say(error.format_message())
        return ExitCode.USAGE
    except click.UsageError as error:
        return _fail(_usage_error(error), output, argv)
    except click.ClickException as error:
        return _fail(UsageError(error.format_message()), output, argv)
    except HeteroError as error:
        return _fail(error, output, argv)
    except (KeyboardInterrupt, click.Abort):
        return ExitCode.INTERRUPTED
    except render.ReaderLeft:
        return _reader_left()
    except Exception as error:  # noqa: BLE001  (the outermost frame: whatever is left is a bug, and is reported as one)
        return _fail(_as_bug(error, argv), output, argv)


def _invoke(argv: Sequence[str]) -> int:
    code = cli.main(list(argv), prog_name=PROGRAM, standalone_mode=False, obj=list(argv))
    return code if isinstance(code, int) else ExitCode.OK


def wanted_format(argv: Sequence[str]) -> render.Format:
    """Return the ``-o`` of a command line that may not even parse, so that errors keep to it."""
    own = _before_engine_flags(argv)
    for position, word in enumerate(own):
        following = own[position + 1] if position + 1 < len(own) else ""
        if word in {"-ojson", "--output=json"} or (word in {"-o", "--output"} and following == "json"):
            return render.Format.JSON
    return render.Format.TABLE


def _before_engine_flags(argv: Sequence[str]) -> Sequence[str]:
    return argv[: list(argv).index("--")] if "--" in argv else argv


def _fail(error: HeteroError, output: render.Format, argv: Sequence[str]) -> int:
    if "--debug" in _before_engine_flags(argv):
        render.say("".join(traceback.format_exception(error)).rstrip())
    render.error(error.report, output)
    return error.exit_code


def _usage_error(error: click.UsageError) -> UsageError:
    where = error.ctx.command_path if error.ctx is not None else PROGRAM
    wrapped = UsageError(error.format_message(), next=(f"{where} --help",))
    wrapped.__cause__ = error
    return wrapped


def _as_bug(error: Exception, argv: Sequence[str]) -> InternalError:
    """Wrap an unexpected exception, its traceback saved in the state folder."""
    wrapped = InternalError(
        f"unexpected {type(error).__name__}: {error}",
        cause="this is a bug in hetero-llm, not in what you asked for",
        next=("run it again with --debug to see the traceback",),
        log=_save_traceback(error, argv),
    )
    wrapped.__cause__ = error
    return wrapped


def _save_traceback(error: Exception, argv: Sequence[str]) -> str | None:
    from hetero_llm.cluster.state import logs_dir

    try:
        path = logs_dir() / f"bug-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}.log"
        path.write_text(f"{PROGRAM} {' '.join(argv)}\n\n{''.join(traceback.format_exception(error))}")
    except (FolderUnusable, OSError):  # no place to write to: the error itself still says all it can
        return None
    return str(path)


def _reader_left() -> int:
    # ``hetero-llm logs … | head``: not a failure. The interpreter would complain when it flushes stdout at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return ExitCode.OK
