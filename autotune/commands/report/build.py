"""``autotune report build``: what was found, the evidence, and what to do next, as HTML, Markdown and JSON."""

from pathlib import Path
from typing import Annotated

import typer

from autotune.commands.completion import profiles
from autotune.commands.options import REPORTS, ProfileData, Reports

_DEFAULT_NAME = "report.html"


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
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object with the places of all three.")
    ] = False,
) -> None:
    """Write a report of profiles, their trials and training runs: HTML, Markdown and JSON with the same facts."""
    from autotune.search.profiles import report_directory
    from autotune.show.answers import answer_json
    from autotune.tuning.report import build_report

    place = out or report_directory(profile[0], reports) / _DEFAULT_NAME
    places = build_report(profile, reports, place, runs=run or (), data=data)
    said = {name: str(path) for name, path in places.items()}
    print(answer_json(said) if as_json else _text(said))


def _text(places: dict[str, str]) -> str:
    return f"report: {places['html']}\nthe same as Markdown: {places['markdown']}\nfor programs: {places['json']}"
