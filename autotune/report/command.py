"""``autotune report``: results, evidence and next steps, as HTML, Markdown and JSON."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from autotune.console.options import (
    REPORTS,
    AsJson,
    ProfileData,
    Reports,
    option,
    profiles,
)


def report(
    *,
    profile: Annotated[
        list[Path],
        typer.Argument(
            metavar="PROFILE",
            help="Profiles to report on together.",
            autocompletion=profiles,
        ),
    ],
    run: Annotated[
        list[Path] | None, option("DIR", "Training run to include; repeatable.")
    ] = None,
    data: ProfileData = None,
    out: Annotated[
        Path | None,
        option(
            "PATH",
            "HTML file; Markdown and JSON go beside it. Default:"
            " reports/PROFILE/report.html.",
        ),
    ] = None,
    reports: Reports = REPORTS,
    as_json: AsJson = False,
    form: Annotated[
        Literal["files", "pr"],
        typer.Option(
            "--format",
            help=(
                "pr: print five lines of Markdown for a pull request, and write"
                " nothing."
            ),
        ),
    ] = "files",
) -> None:
    """Write a report as HTML, Markdown and JSON."""
    from autotune.base.answer_json import answer_json
    from autotune.report.stage import build_report, pull_request_text
    from autotune.trials.trial_log import report_directory

    if form == "pr":
        print(pull_request_text(profile, reports, runs=run or (), data=data))
        return
    html_path = out or report_directory(profile[0], reports) / "report.html"
    paths = build_report(profile, reports, html_path, runs=run or (), data=data)
    if as_json:
        print(answer_json({name: str(path) for name, path in paths.items()}))
        return
    print(f"report: {paths['html']}")
    print(f"Markdown: {paths['markdown']}")
    print(f"JSON: {paths['json']}")
