"""Review of profiles of your own training code: report, verification, and what commands print of them."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.base import document as doc
from autotune.base.document import facts, plain
from autotune.base.files import json_rows, write_atomically
from autotune.base.tables import Row
from autotune.integrations.sections import loader_section, own_profile_text, step_section, trials_table
from autotune.integrations.store import StoredOwn, read_own
from autotune.machine.host import SystemHost
from autotune.machine.measured_device import DeviceChoice, fingerprint, open_device
from autotune.machine.nvml import NvmlMonitor
from autotune.profiles.decide.follow_up import command
from autotune.profiles.decide.trial_log_check import compare, shown
from autotune.profiles.sections import approval_line, fingerprint_table
from autotune.profiles.values import Check, Fingerprint, TrialLogCheck, Verification
from autotune.trials.trial_log import (
    TRIAL_LOG_DIRECTORY,
    own_records,
    read_trial_records,
    report_directory,
    trial_log_sha256,
)
from autotune.trials.values import FinishedTrial


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewedOwn:
    """A profile of your own code with its trials."""

    stored: StoredOwn
    trials: tuple[FinishedTrial, ...]
    trial_log: TrialLogCheck


def read_reviewed(path: Path, reports: Path) -> ReviewedOwn:
    """Read a profile with its approval and trial log."""
    stored = read_own(path, reports)
    profile = stored.profile
    records, _ = read_trial_records(report_directory(path, reports) / TRIAL_LOG_DIRECTORY)
    own = own_records(records, profile.fingerprint, None)
    until = profile.provenance.trial_log_until_utc
    behind = tuple(record for record in own if until is None or record.time_utc <= until)
    same = trial_log_sha256(behind) == profile.provenance.trial_log_sha256
    check = TrialLogCheck(
        found="no trials" if not own else "same" if same else "differs", trials=len(behind),
        added=len(own) - len(behind), others=len(records) - len(own), unfounded=(),
    )  # fmt: skip
    return ReviewedOwn(stored=stored, trials=tuple(record.finished() for record in own), trial_log=check)


def show_text(path: Path, reports: Path) -> str:
    """Return a profile for people."""
    stored = read_own(path, reports)
    return own_profile_text(stored.profile, intact=stored.intact, approval=approval_line(stored.approval))


def show_json(path: Path, reports: Path) -> dict[str, Any]:
    """Return a profile, whether it was edited, and its approval, as JSON."""
    stored = read_own(path, reports)
    return {**plain(stored.profile), "intact": stored.intact, "approval": stored.approval.state}


def verify_own(stored: StoredOwn, read_cuda: Callable[[], str | None]) -> Verification:
    """Compare a profile with this machine; your source is not imported.

    ``read_cuda`` returns the CUDA version that torch is built for; it is called only if a GPU is compared.
    """
    made_on = stored.profile.fingerprint
    monitor = NvmlMonitor()
    try:
        choice: DeviceChoice = "auto" if made_on.device == "cuda" else "cpu"
        site = open_device(choice, stored.path.parent, SystemHost(), monitor, measures=False)
    finally:
        monitor.close()
    here = fingerprint(site, made_on.model_sha256, None, read_cuda() if site.device == "cuda" else made_on.cuda)
    differ = {one.field: one for one in compare(made_on, here)}
    checks = []
    for field in Fingerprint.model_fields:
        value = shown(getattr(made_on, field))
        same = Check(field=field, found="same", profile=value, here=value)
        if field == "model_sha256":
            why = "your code is not imported to check it"
            same = Check(field="source", found="info", profile=value, here=why)
        checks.append(differ.get(field, same))
    return Verification(checks=tuple(checks))


def build_own_report(paths: Sequence[Path], reports: Path, out: Path) -> dict[str, Path]:
    """Write a report of profiles of your own code as HTML, Markdown and JSON; return the three paths."""
    from autotune.base.render import report_html, report_markdown

    reviewed = [read_reviewed(path, reports) for path in paths]
    document = _document(reviewed)
    html = out.with_suffix(".html")
    places = {"html": html, "markdown": html.with_suffix(".md"), "json": html.with_suffix(".json")}
    facts_ = [{"path": str(one.stored.path), **show_json(one.stored.path, reports)} for one in reviewed]
    write_atomically(places["json"], json_rows({"profiles": facts_}))
    write_atomically(places["markdown"], report_markdown(document))
    write_atomically(places["html"], report_html(document))
    return places


def _document(reviewed: Sequence[ReviewedOwn]) -> doc.Document:
    first = reviewed[0].stored.profile
    sections: list[doc.Section] = []
    for number, one in enumerate(reviewed):
        profile, quoted = one.stored.profile, shlex.quote(str(one.stored.path))
        title = profile.subject.words
        tuned = " · ".join(f"{name} {value}" for name, value in profile.tuned.items())
        answer: tuple[doc.Block, ...] = (
            doc.Paragraph(words=(doc.Strong(text=tuned),), large=True),
            doc.Pairs(pairs=(("Approval", (approval_line(one.stored.approval),)),)),
        )
        sections.append(doc.Section(title=title, key=f"answer-{number}", blocks=answer))
        sections.append(doc.Section(title=f"Memory: {title}", key=f"memory-{number}", blocks=step_section(profile)))
        sections.append(
            doc.Section(title=f"Data loading: {title}", key=f"workers-{number}", blocks=loader_section(profile))
        )
        sections.append(
            doc.Section(title=f"Trials: {title}", key=f"trials-{number}", blocks=(trials_table(one.trials),))
        )
        approve: doc.Words = (doc.Code(text=f"autotune profile approve {quoted} --by NAME"),)
        blocks = (doc.Bullets(items=(*_commands(one), approve)), facts("Identifiers", _identifiers(one)))
        sections.append(doc.Section(title=f"Reproduce and approve: {title}", key=f"reproduce-{number}", blocks=blocks))
    names = tuple(one.stored.path.stem for one in reviewed)
    made_on = fingerprint_table([one.stored.profile.fingerprint for one in reviewed], names)
    sections.append(doc.Section(title="Machine", key="machine", blocks=(made_on,)))
    place = first.fingerprint.gpu_name or first.fingerprint.cpu_model or first.fingerprint.device
    known = "Memory is that of torch's allocator." if first.fingerprint.bytes_known == "allocator" else "Measured."
    subtitle = f"{place}, torch {first.fingerprint.torch}, {first.provenance.created_utc[:10]}. {known}"
    return doc.Document(title="Tuning report: your own training code", subtitle=subtitle, sections=tuple(sections))


def _commands(one: ReviewedOwn) -> tuple[doc.Words, ...]:
    subject, path = one.stored.profile.subject, one.stored.path
    fixed = [f"{name}={value}" for name, value in subject.arguments.items()] or None
    known = {
        "probe": command("probe", step=subject.step, set=fixed, out=path),
        "workers": command("workers", path, loader=subject.loader),
    }
    return tuple((doc.Code(text=known[name]),) for name in one.stored.profile.provenance.commands if name in known)


def _identifiers(one: ReviewedOwn) -> list[Row]:
    profile = one.stored.profile
    return [
        ["profile", str(one.stored.path)],
        ["profile, hash of its content", one.stored.approval.present_sha256],
        ["source of the step, hash", profile.subject.step_sha256],
        ["source of the loader, hash", profile.subject.loader_sha256],
        ["trials, hash", profile.provenance.trial_log_sha256],
        ["compared with the trial log", one.trial_log.found],
        ["written", profile.provenance.created_utc],
        ["SLURM job", profile.provenance.slurm_job_id],
    ]
