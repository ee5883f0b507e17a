"""The command line: registers the commands, and turns errors into exit codes."""

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Collection
from typing import Annotated

import typer
from typer.exceptions import TyperException

from autotune.base.log import show_messages
from autotune.console.arguments import plain_arguments
from autotune.console.commands import COMMANDS, CommandEntry
from autotune.console.help import Command, Group, usage_error
from autotune.console.json_document import (
    CommandFailure,
    run_for_json,
    wants_json,
)
from autotune.errors import EXIT_INTERRUPTED, INTERRUPTED, AutotuneError
from trainer.formats.errors import TrainerError, error_text, permission_denied

COMPLETION_VARIABLE = "_AUTOTUNE_COMPLETE"
"""Environment variable by which the shell asks for completions."""


def application(used: Collection[str] | None = None) -> typer.Typer:
    """Return the command line.

    Args:
        used: Names of the commands that can be called; of the others, which are not
            imported, only the name and summary are known. None imports all.
    """
    app = typer.Typer(
        name="autotune",
        cls=Group,
        help=(
            "Find the fastest settings for a BERT pretraining run before you pay for"
            " it."
        ),
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_options)
    for entry in COMMANDS:
        if used is None or entry.name in used:
            _register(app, entry)
        else:
            placeholder = app.command(
                entry.name, cls=Command, help=entry.summary, hidden=entry.hidden
            )
            placeholder(_unused)
    return app


def _register(app: typer.Typer, entry: CommandEntry) -> None:
    command_or_group = getattr(importlib.import_module(entry.module), entry.attribute)
    if entry.is_group:
        known = {command.name for command in command_or_group.registered_commands}
        for name, module, attribute in entry.also:
            if name not in known:
                function = getattr(importlib.import_module(module), attribute)
                command_or_group.command(name)(function)
        for registered in command_or_group.registered_commands:
            registered.cls = Command
        app.add_typer(command_or_group, name=entry.name, cls=Group, hidden=entry.hidden)
    else:
        app.command(entry.name, cls=Command, hidden=entry.hidden)(command_or_group)


def _unused() -> None:
    """Stand for a command that is not imported."""
    raise AssertionError("only commands that are used can be called")


def _options(
    *,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.")
    ] = False,
) -> None:
    """Declare the options that stand before a command.

    They are for help only: ``run`` answers ``--version``.
    """


def main() -> None:
    """Run the command line and exit with its code."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code.

    Every code but 0 has a message on standard error. With ``--json``, standard output
    has one document, also for an error.
    """
    if arguments == ["--version"]:
        print(f"autotune {importlib.metadata.version('encoder-autotune')}")
        return 0
    plain = plain_arguments(arguments)
    if wants_json(plain):
        return run_for_json(lambda: _run(plain))
    exit_code, _ = _run(plain)
    return exit_code


def _run(plain: tuple[str, ...]) -> tuple[int, CommandFailure | None]:
    """Run a command; return its exit code, and its error if it raised one."""
    show_messages()
    app = application(None if COMPLETION_VARIABLE in os.environ else plain[:1])
    try:
        result = app(
            list(plain), obj=plain, prog_name="autotune", standalone_mode=False
        )
    except SystemExit as stop:
        # As Python itself: no code is success, and a text is failure.
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        return code, None
    except TyperException as error:
        return _reported(usage_error(error, plain))
    except (AutotuneError, TrainerError) as error:
        return _reported(error)
    except PermissionError as error:
        return _reported(permission_denied(error))
    # Commands return their exit code, or None for 0.
    exit_code = int(result or 0)
    if exit_code == EXIT_INTERRUPTED:
        sys.stderr.write(INTERRUPTED)
    return exit_code, None


def _reported(error: AutotuneError | TrainerError) -> tuple[int, CommandFailure]:
    """Write the message of an error; return its exit code, and the error."""
    sys.stderr.write(error_text(error.message, error.next_step, error.docs))
    failure = CommandFailure(
        code=error.exit_code, message=error.message, next=error.next_step
    )
    return error.exit_code, failure
