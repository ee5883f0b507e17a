"""``autotune data``: raw data to a tokenised dataset, and what is done with one."""

import typer

from autotune.commands.data.inspect import inspect
from autotune.commands.data.prepare import prepare
from autotune.commands.data.stage import stage
from autotune.commands.data.verify import verify

app = typer.Typer(
    no_args_is_help=True,
    help="Prepare a tokenised dataset, look at it, check it, and copy it to a local disk.",
    rich_markup_mode=None,
)
app.command("prepare")(prepare)
app.command("inspect")(inspect)
app.command("verify")(verify)
app.command("stage")(stage)
