"""``autotune launch status``: how runs and tunings are doing, from any node that sees their files."""

from pathlib import Path
from typing import Annotated

import typer

from autotune.commands.options import REPORTS, AsJson, Reports


def status(
    places: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN_OR_REPORT_DIR]...", help="Default: everything under runs/ and reports/."),
    ] = None,
    *,
    runs: Annotated[Path, typer.Option(help="Where runs lie.")] = Path("runs"),
    reports: Reports = REPORTS,
    as_json: AsJson = False,
) -> None:
    """Show how training runs and tunings are doing; SLURM is asked where it is there."""
    from autotune.cluster.submit import queued_jobs
    from autotune.errors import BadInput
    from autotune.search.standing import find_standings, standing_of_run, standing_of_tuning
    from autotune.show.answers import answer_json
    from autotune.show.tuning import standings_text

    for place in places or []:
        if not place.is_dir():
            raise BadInput(f"{place} is not a directory", next_step="Name a run, or the directory of a report.")
    jobs = queued_jobs()
    run_places, report_places = find_standings(list(places or []), runs, reports)
    of_runs = [standing_of_run(place, jobs) for place in run_places]
    tunings = [standing_of_tuning(place) for place in report_places]
    if as_json:
        print(answer_json({"slurm_asked": jobs is not None, "runs": of_runs, "tunings": tunings}))
    else:
        print(standings_text(of_runs, tunings, asked=jobs is not None))
