"""Entry point of the command line: ``zipmoe pack | inspect | verify | profile | plan | run | simulate | bench``.

Standard output carries data, standard error everything else. Errors that the user can do something about are one line
and a hint, with exit code 2 for bad input and 1 for damaged data.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Annotated, Any

import typer

from zipmoe._version import __version__
from zipmoe.cli.bench_command import bench_command
from zipmoe.cli.inspect_command import inspect_command
from zipmoe.cli.pack_command import pack_command
from zipmoe.cli.plan_command import plan_command
from zipmoe.cli.profile_command import profile_command
from zipmoe.cli.run_command import run_command
from zipmoe.cli.simulate_command import simulate_command
from zipmoe.cli.verify_command import verify_command
from zipmoe.errors import ZipMoEError

EXIT_INTERRUPTED = 130
_USAGE_ERROR: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "UsageError")
"""Recent Typer carries Click inside, earlier ones need the package: the public class leads to either."""

app = typer.Typer(
    name="zipmoe",
    help="Run Mixture-of-Experts language models that are bigger than memory, without changing a single weight bit.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=False,
)
app.command("pack", short_help="Pack a checkpoint, without losing a bit")(pack_command)
app.command("inspect", short_help="Show what a packed folder contains")(inspect_command)
app.command("verify", short_help="Check a packed folder, alone or against the original")(verify_command)
app.command("profile", short_help="Measure this machine for the planner")(profile_command)
app.command("plan", short_help="Divide the memory of a run among cache pools")(plan_command)
app.command("run", short_help="Generate text from a packed folder")(run_command)
app.command("simulate", short_help="Replay a routing trace on a machine")(simulate_command)
app.command("bench", short_help="Compare with what people use instead, under the same memory limit")(bench_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"zipmoe {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


def report_error(message: str, hint: str | None = None) -> None:
    """Print an error as one line, and its hint as another, to standard error."""
    sys.stderr.write(f"error: {' '.join(message.split())}\n")
    if hint:
        sys.stderr.write(f"hint: {hint}\n")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit code: 0 done, 1 damaged data, 2 bad input, 130 interrupted.
    """
    command = typer.main.get_command(app)
    try:
        result = command.main(args=arguments, prog_name="zipmoe", standalone_mode=False)
        if result == EXIT_INTERRUPTED:  # no command returns a number: Typer made this one of a KeyboardInterrupt
            return _report_interrupt()
        return result if isinstance(result, int) else 0
    except _USAGE_ERROR as error:
        return _report_usage(error)
    except typer.Exit as error:
        return int(error.exit_code)
    except ZipMoEError as error:
        report_error(str(error), error.hint)
        return error.exit_code
    except OSError as error:  # of the system, not of the data: permissions, a disk that fails, too many open files
        if error.errno == errno.EPIPE:
            sys.stderr.close()
            return EXIT_INTERRUPTED
        where = f"{os.fsdecode(error.filename)!r}: " if isinstance(error.filename, str | bytes) else ""
        report_error(f"{where}{error.strerror or error}")
        return 1
    except (KeyboardInterrupt, typer.Abort):
        return _report_interrupt()


def _report_interrupt() -> int:
    if sys.stderr.isatty():  # the cursor may stand behind half a line of text, and does behind the ^C
        sys.stderr.write("\n")
    report_error("interrupted")
    return EXIT_INTERRUPTED


def _report_usage(error: Any) -> int:
    if type(error).__name__ == "NoArgsIsHelpError":
        sys.stderr.write(f"{error.format_message()}\n")
    else:
        path = error.ctx.command_path if error.ctx else "zipmoe"
        report_error(error.format_message(), f"see {path} --help")
    return 2


def console_script() -> None:
    """What the installed ``zipmoe`` command calls."""
    sys.exit(main())
