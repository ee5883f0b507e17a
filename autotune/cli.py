"""The command line: registers the commands, and turns errors into messages and exit codes."""

import sys

import typer

from autotune.advice.command import advise
from autotune.baseline.command import baseline
from autotune.compare.command import compare
from autotune.console.slurm_job import plain_arguments
from autotune.corpus.command import app as data
from autotune.errors import EXIT_INTERRUPTED, INTERRUPTED, AutotuneError
from autotune.export.command import export
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
from trainer.errors import TrainerError

app = typer.Typer(
    name="autotune",
    help="Find out what fits, what is enough, and what to change before an encoder is pretrained.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
# In the order in which they are typed.
for command in (
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
):
    app.command()(command)
app.add_typer(data, name="data")
profile.command()(export)
app.add_typer(profile, name="profile")
app.command(hidden=True)(tune_between_nodes)
app.add_typer(job, name="job", hidden=True)


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
