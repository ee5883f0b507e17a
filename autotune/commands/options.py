"""Options that several commands have, each said once."""

from pathlib import Path
from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Reports = Annotated[Path, typer.Option(help="Where ledgers and reports lie.")]
REPORTS = Path("reports")
Here = Annotated[bool, typer.Option("--here", help="Measure here though this looks like a login node.")]
TrialTimeout = Annotated[float, typer.Option(min=1, help="Seconds that one trial may take.")]
TRIAL_TIMEOUT_S = 600.0
ProfileData = Annotated[
    Path | None, typer.Option(help="Dataset directory. Default: the profile's.", envvar="AUTOTUNE_DATA")
]
