"""``autotune profile``: read a profile, verify it on this machine, learn why it says what it says."""

import typer

from autotune.commands.profile.explain import explain
from autotune.commands.profile.show import show
from autotune.commands.profile.verify import verify

app = typer.Typer(help="Read, check and explain profiles.", no_args_is_help=True, rich_markup_mode=None)
app.command("show")(show)
app.command("verify")(verify)
app.command("explain")(explain)
