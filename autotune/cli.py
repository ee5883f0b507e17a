"""The command line: registers the commands, and turns errors into messages and exit codes."""

import sys

import typer

from autotune.commands import (
    advise,
    baseline,
    compare,
    data,
    doctor,
    estimate,
    export,
    launch,
    network,
    plan,
    probe,
    profile,
    report,
    scale,
    tune,
    workers,
)
from autotune.commands.jobs import plain_arguments
from autotune.errors import EXIT_INTERRUPTED, INTERRUPTED, AutotuneError
from trainer.errors import TrainerError

app = typer.Typer(
    name="autotune",
    help="Find out what fits, what is enough, and what to change before an encoder is pretrained.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("doctor")(doctor.doctor)
app.add_typer(data.app, name="data")
app.command("estimate")(estimate.estimate)
app.command("probe")(probe.probe)
app.command("workers")(workers.workers)
app.command("network")(network.network)
app.command("scale")(scale.scale)
app.command("plan")(plan.plan)
app.command("baseline")(baseline.baseline)
app.command("tune")(tune.tune)
app.command("tune-between-nodes", hidden=True)(tune.tune_between_nodes)
app.command("advise")(advise.advise)
app.command("compare")(compare.compare)
app.command("export")(export.export)
app.add_typer(launch.app, name="launch")
app.add_typer(profile.app, name="profile")
app.add_typer(report.app, name="report")


def main() -> None:
    """Run the command line and exit with its code."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command line.

    Returns:
        The exit code; a message has been written to standard error for every code but 0.
    """
    try:
        plain = plain_arguments(arguments)
        app(list(plain), obj=plain, prog_name="autotune")
    except (AutotuneError, TrainerError) as error:
        sys.stderr.write(f"error: {error.message}\n  next: {error.next_step}\n")
        return error.exit_code
    except SystemExit as stop:  # how the parser returns, usage errors included
        if stop.code == EXIT_INTERRUPTED:
            sys.stderr.write(INTERRUPTED)
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 0
