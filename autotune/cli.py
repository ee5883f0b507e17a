"""The command line: registers the commands, and turns errors into messages and exit codes."""

import sys

import typer

from autotune.advice.command import advise
from autotune.baseline.command import baseline
from autotune.compare.command import compare
from autotune.console.slurm_job import plain_arguments
from autotune.corpus.command import app as data_app
from autotune.errors import EXIT_INTERRUPTED, INTERRUPTED, AutotuneError
from autotune.export.command import export
from autotune.launch.command import app as launch_app
from autotune.machine.command import doctor
from autotune.memory.command import estimate, probe
from autotune.network.command import network
from autotune.network.scale_command import scale
from autotune.plan.command import plan
from autotune.profiles.command import app as profile_app
from autotune.report.command import app as report_app
from autotune.tune.command import tune, tune_between_nodes
from autotune.workers.command import workers
from trainer.errors import TrainerError

app = typer.Typer(
    name="autotune",
    help="Find out what fits, what is enough, and what to change before an encoder is pretrained.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in (
    doctor,
    estimate,
    probe,
    workers,
    network,
    scale,
    plan,
    baseline,
    tune,
    advise,
    compare,
    export,
):
    app.command()(command)
app.command(hidden=True)(tune_between_nodes)
for name, group in {"data": data_app, "launch": launch_app, "profile": profile_app, "report": report_app}.items():
    app.add_typer(group, name=name)


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
