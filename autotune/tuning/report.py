"""The report stage: what was found, the evidence, and what to do next, as HTML, Markdown and JSON."""

from collections.abc import Sequence
from pathlib import Path

from autotune.errors import UsageError
from autotune.measure.host import SystemHost
from autotune.search.reported import reported_profile, reported_run
from autotune.store import json_rows, write_atomically

MOST_PROFILES, MOST_RUNS = 12, 24


def build_report(
    profiles: Sequence[Path], reports: Path, out: Path, *, runs: Sequence[Path] = (), data: Path | None = None
) -> dict[str, Path]:
    """Write a report of profiles, their trials and training runs.

    Args:
        profiles: One or several.
        reports: Where their ledgers lie.
        out: The HTML file, or one of the two that lie beside it.
        runs: Directories of trainings from these profiles.
        data: The dataset; None takes what each profile names.

    Returns:
        Where the three forms lie, by ``html``, ``markdown`` and ``json``.

    Raises:
        UsageError: If there are more profiles or runs than one report takes, or two of the same name.
    """
    if len(profiles) > MOST_PROFILES or len(runs) > MOST_RUNS:
        raise UsageError(
            f"{len(profiles)} profiles and {len(runs)} runs exceed the {MOST_PROFILES} profiles and {MOST_RUNS} runs "
            "that one report takes",
            next_step="Build several reports, each with its own --out.",
        )
    for names in ([path.stem for path in profiles], [directory.name for directory in runs]):
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise UsageError(
                f"two of them are named {twice!r}, so a report could not tell them apart",
                next_step="Rename one, or build a report of each with its own --out.",
            )
    # They load a library of charts, which other stages do without.
    from autotune.show.report.build import report_document
    from autotune.show.report.facts import report_facts
    from autotune.show.text import report_html, report_markdown

    host = SystemHost()
    reported = tuple(reported_profile(path, reports, host, data=data) for path in profiles)
    trained = tuple(reported_run(directory, reported, host) for directory in runs)
    document = report_document(reported, trained)
    html = _html_place(out)
    places = {"html": html, "markdown": html.with_suffix(".md"), "json": html.with_suffix(".json")}
    write_atomically(places["json"], json_rows(report_facts(reported, trained, document)))
    write_atomically(places["markdown"], report_markdown(document))
    write_atomically(places["html"], report_html(document))
    return places


def _html_place(out: Path) -> Path:
    """The name of the HTML file, whichever of the three files was named."""
    known = out.suffix.lower() in {".html", ".md", ".json"}
    return out.with_suffix(".html") if known else out.with_name(f"{out.name}.html")
