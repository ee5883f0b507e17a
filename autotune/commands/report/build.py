"""``autotune report build``: what was found, the evidence, and what to do next, as HTML, Markdown and JSON."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from autotune.commands.options import REPORTS, ProfileData, Reports

_DEFAULT_NAME = "report.html"


def build(
    *,
    profile: Annotated[list[Path], typer.Argument(help="Profiles; several make one report.")],
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
    from autotune.measure.host import SystemHost
    from autotune.search.profiles import report_directory
    from autotune.search.reported import reported_profile, reported_run
    from autotune.show.report.build import report_document
    from autotune.show.report.facts import report_facts
    from autotune.show.report.html import report_html
    from autotune.show.report.markdown import report_markdown
    from autotune.store import write_atomically

    host = SystemHost()
    profiles = tuple(reported_profile(path, reports, host, data=data) for path in profile)
    runs = tuple(reported_run(directory, profiles, host) for directory in run or ())
    document = report_document(profiles, runs)
    html = _html_place(out or report_directory(profile[0], reports) / _DEFAULT_NAME)
    places = {"html": html, "markdown": html.with_suffix(".md"), "json": html.with_suffix(".json")}
    write_atomically(places["json"], _json_text(report_facts(profiles, runs, document)))
    write_atomically(places["markdown"], report_markdown(document))
    write_atomically(places["html"], report_html(document))
    said = {name: str(place) for name, place in places.items()}
    print(json.dumps({"report": str(html), **said}) if as_json else _text(said))


def _html_place(out: Path) -> Path:
    """The name of the HTML file, whichever of the three files was named."""
    known = out.suffix.lower() in {".html", ".md", ".json"}
    return out.with_suffix(".html") if known else out.with_name(f"{out.name}.html")


def _json_text(facts: dict[str, Any]) -> str:
    return json.dumps(facts, indent=1, allow_nan=False, default=str) + "\n"


def _text(places: dict[str, str]) -> str:
    return f"report: {places['html']}\nthe same as Markdown: {places['markdown']}\nfor programs: {places['json']}"
