"""The commands and what each is for, so that help imports none of them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandEntry:
    """A command or a group of commands, imported when it is used."""

    name: str
    module: str
    attribute: str
    """Function of a command, or the typer application of a group."""
    summary: str
    """First line of its help; a test compares it with that of the command."""
    is_group: bool = False
    also: tuple[tuple[str, str, str], ...] = ()
    """Commands of a group from higher packages: name, module and function."""
    hidden: bool = False


def _command(name: str, package: str, summary: str) -> CommandEntry:
    return CommandEntry(
        name=name, module=f"autotune.{package}.command", attribute=name, summary=summary
    )


COMMANDS = (
    _command("doctor", "doctor", "Check this machine for measurement problems."),
    _command("estimate", "memory", "Predict the largest micro-batch without a GPU."),
    _command("tune", "tune", "Find the fastest training settings for your data."),
    _command("probe", "memory", "Find the largest micro-batch that fits."),
    _command("workers", "workers", "Find the fewest DataLoader workers that suffice."),
    _command("network", "network", "Find the fastest gradient synchronisation."),
    _command("confirm", "confirm", "Measure what training from a profile delivers."),
    _command("baseline", "baseline", "Measure the speedup over untuned settings."),
    _command("report", "report", "Write a report as HTML, Markdown and JSON."),
    _command("compare", "compare", "Show which differences exceed noise."),
    _command("advise", "advice", "Find the bottleneck and recommend changes."),
    _command("plan", "plan", "Predict steps, time, cost and memory of a run."),
    _command("train", "launch", "Train from a profile, here or as a SLURM job."),
    _command("status", "launch", "Show the state of training runs and tunings."),
    CommandEntry(
        name="tune-between-nodes",
        module="autotune.tune.command",
        attribute="tune_between_nodes",
        summary="Measure the network between this job's nodes.",
        hidden=True,
    ),
    CommandEntry(
        name="data",
        module="autotune.corpus.command",
        attribute="app",
        summary="Prepare, inspect, verify and stage datasets.",
        is_group=True,
    ),
    CommandEntry(
        name="profile",
        module="autotune.profiles.command",
        attribute="app",
        summary="Show, verify, approve and export profiles.",
        is_group=True,
        also=(("export", "autotune.export.command", "export"),),
    ),
    CommandEntry(
        name="job",
        module="autotune.launch.job_commands",
        attribute="app",
        summary="Commands for job scripts.",
        is_group=True,
        hidden=True,
    ),
)
"""All commands; the order in help is that of ``autotune.console.help.SECTIONS``."""
