"""The command line: registers the commands, and turns errors into messages and exit codes."""

import importlib.metadata
import sys
from typing import Annotated

import typer
from typer.exceptions import TyperException

from autotune.advice.command import advise
from autotune.baseline.command import baseline
from autotune.compare.command import compare
from autotune.console.help import Command, Group, usage_error
from autotune.console.slurm_job import plain_arguments
from autotune.corpus.command import app as data
from autotune.errors import EXIT_INTERRUPTED, INTERRUPTED, AutotuneError
from autotune.launch.command import status, train
from autotune.launch.job_commands import app as job
from autotune.machine.command import doctor
from autotune.memory.command import estimate, probe
from autotune.network.command import network
from autotune.plan.command import plan
from autotune.profiles.command import app as profile
from autotune.report.command import report
from autotune.tune.command import tune, tune_between_nodes
from autotune.workers.command import workers
from trainer.errors import TrainerError, error_text

app = typer.Typer(
    name="autotune",
    cls=Group,
    help="Find the fastest settings for a BERT pretraining run before you pay for it.",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
commands = (
    doctor,
    estimate,
    tune,
    probe,
    workers,
    network,
    baseline,
    report,
    compare,
    advise,
    plan,
    train,
    status,
)
for command in commands:
    app.command()(command)
app.command(hidden=True)(tune_between_nodes)
for name, group in {"data": data, "profile": profile, "job": job}.items():
    app.add_typer(group, name=name, cls=Group, hidden=group is job)
for group in (app, data, profile, job):
    for registered in group.registered_commands:
        registered.cls = Command


@app.callback()
def options(
    *,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.")
    ] = False,
) -> None:
    """Declare the options that stand before a command.

    ``run`` answers ``--version``.
    """


def main() -> None:
    """Run the command line and exit with its code."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code.

    Every code but 0 has a message on standard error.
    """
    if arguments == ["--version"]:
        print(f"autotune {importlib.metadata.version('encoder-autotune')}")
        return 0
    plain = plain_arguments(arguments)
    try:
        code = int(
            app(list(plain), obj=plain, prog_name="autotune", standalone_mode=False)
            or 0
        )
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except (TyperException, AutotuneError, TrainerError) as error:
        failure = (
            usage_error(error, plain) if isinstance(error, TyperException) else error
        )
        sys.stderr.write(error_text(failure.message, failure.next_step, failure.docs))
        return failure.exit_code
    if code == EXIT_INTERRUPTED:
        sys.stderr.write(INTERRUPTED)
    return code
