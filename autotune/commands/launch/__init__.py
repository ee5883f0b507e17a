"""``autotune launch``: training from a profile, here or as a SLURM job; and how it is doing."""

import typer

from autotune.commands.launch.inside import address, ended, meet, outside, preflight
from autotune.commands.launch.local import local
from autotune.commands.launch.slurm import slurm
from autotune.commands.launch.status import status

app = typer.Typer(
    no_args_is_help=True,
    help="Train from a profile, here or as a SLURM job, and see how runs and tunings are doing.",
    rich_markup_mode=None,
)
app.command("local")(local)
app.command("slurm")(slurm)
app.command("status")(status)
# What the scripts of jobs call on their nodes.
app.command("preflight", hidden=True)(preflight)
app.command("meet", hidden=True)(meet)
app.command("address", hidden=True)(address)
app.command("outside", hidden=True)(outside)
app.command("ended", hidden=True)(ended)
