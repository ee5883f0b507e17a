"""``autotune launch local``: torchrun on this machine, from a profile."""

import os
import sys
from typing import Annotated

import typer

from autotune.commands.launch.training import (
    DataOption,
    ProfileOption,
    RequireApproved,
    RunOption,
    SetOption,
    train_request,
)
from autotune.commands.options import REPORTS, Reports


def local(
    *,
    profile: ProfileOption,
    data: DataOption = None,
    out: RunOption = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Processes. Default: one for each GPU of the profile; as probed on a CPU.")
    ] = None,
    assignments: SetOption = None,
    require_approved: RequireApproved = False,
    reports: Reports = REPORTS,
) -> None:
    """Train here; the exit code is the run's own, which torchrun does not pass on."""
    from autotune.cluster.ending import PATIENCE_HERE_S, ending_of
    from autotune.cluster.local import run_child
    from autotune.cluster.site import DEFAULT_SITE, find_site, read_site
    from autotune.cluster.torchrun import torchrun_command
    from autotune.cluster.training import term_lead_s, trainer_arguments
    from trainer.record import EXIT_FILE

    # Of the site file only this counts here: the rest is about jobs.
    site_path = find_site(DEFAULT_SITE, os.environ)
    must_be_approved = require_approved or (site_path is not None and read_site(site_path).require_approved)
    reviews = reports if must_be_approved else None
    request = train_request(profile, data, out, assignments, python=sys.executable, ranks=ranks, reviews=reviews)
    command = torchrun_command(
        request.python,
        trainer_arguments(request, stage_to=None),
        ranks=request.ranks,
        torch_version=request.torch_version,
        shutdown_s=term_lead_s(request),
    )
    environment = dict(os.environ)
    if request.ranks > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")  # what torchrun would set by itself, with a warning
    record = request.run / EXIT_FILE
    said_before = record.read_text(encoding="utf-8", errors="replace") if record.is_file() else ""
    code = run_child(command, environment)
    ending = ending_of(request.run, said_before, code, patience_s=PATIENCE_HERE_S)
    if ending.code:
        sys.stderr.write(f"launch: {ending.words}\n")
        raise typer.Exit(ending.code)
