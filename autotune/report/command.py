"""``autotune report``: what was found, the evidence, and what to do next, as HTML, Markdown and JSON; and approvals."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from autotune.console.options import REPORTS, AsJson, OneProfile, ProfileData, Reports, profiles
from autotune.errors import UsageError

app = typer.Typer(help="Build tuning reports, sign profiles off.", no_args_is_help=True)


@app.command("build")
def build(
    *,
    profile: Annotated[list[Path], typer.Argument(help="Profiles; several make one report.", autocompletion=profiles)],
    run: Annotated[list[Path] | None, typer.Option(help="A training run's directory; repeat for several.")] = None,
    data: ProfileData = None,
    out: Annotated[
        Path | None,
        typer.Option(help="HTML file; Markdown and JSON lie beside it. Default: reports/<profile>/report.html."),
    ] = None,
    reports: Reports = REPORTS,
    as_json: AsJson = False,
) -> None:
    """Write a report of profiles, their trials and training runs: HTML, Markdown and JSON with the same facts."""
    from autotune.base.document import answer_json
    from autotune.report.stage import build_report
    from autotune.trials.trial_log import report_directory

    place = out or report_directory(profile[0], reports) / "report.html"
    places = build_report(profile, reports, place, runs=run or (), data=data)
    if as_json:
        print(answer_json({name: str(path) for name, path in places.items()}))
    else:
        print(f"report: {places['html']}\nthe same as Markdown: {places['markdown']}\nfor programs: {places['json']}")


@app.command("review")
def review(
    *,
    profile: OneProfile,
    approve: Annotated[bool, typer.Option("--approve", help="It may be trained from, as it is now.")] = False,
    reject: Annotated[bool, typer.Option("--reject", help="It may not.")] = False,
    by: Annotated[str | None, typer.Option(metavar="NAME", help="Who says so.")] = None,
    note: Annotated[str | None, typer.Option(metavar="TEXT", help="Why; up to 2,000 characters.")] = None,
    as_edited: Annotated[
        bool, typer.Option("--as-edited", help="Approve what it says now, though it was edited after it was measured.")
    ] = False,
    reports: Reports = REPORTS,
    as_json: AsJson = False,
) -> None:
    """Approve or reject a profile; without either, show how it stands. Any later edit of the profile voids it."""
    from autotune.base.document import answer_json
    from autotune.profiles.approval import read_reviewed
    from autotune.profiles.approval import review as keep
    from autotune.profiles.sections import review_text

    if approve and reject:
        raise UsageError("--approve and --reject contradict each other", next_step="Leave out one of them.")
    if not (approve or reject) and (by is not None or note is not None or as_edited):
        raise UsageError("--by, --note and --as-edited require a verdict", next_step="Add --approve or --reject.")
    if (approve or reject) and by is None:
        raise UsageError("a verdict requires a name", next_step="Add --by NAME.")
    verdict: Literal["approved", "rejected"] = "approved" if approve else "rejected"
    if by is None:
        found = read_reviewed(profile, reports)
    else:
        found = keep(profile, reports, verdict, by=by, note=note, as_edited=as_edited)
    if as_json:
        print(answer_json({"profile": str(profile), "intact": found.intact, "standing": found.standing}))
    else:
        print(review_text(str(profile), found.standing, intact=found.intact))
