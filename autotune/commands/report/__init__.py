"""``autotune report``: build tuning reports, sign profiles off."""

import typer

from autotune.commands.report.build import build
from autotune.commands.report.review import review

app = typer.Typer(help="Build tuning reports, sign profiles off.", no_args_is_help=True)


@app.callback()
def _report() -> None:
    """Build tuning reports."""


app.command("build")(build)
app.command("review")(review)
