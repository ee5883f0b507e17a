"""Review of profiles of your own training code.

It has their report, and their verification on this machine.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.base import document as doc
from autotune.base.answer_json import jsonable
from autotune.base.document import facts_table
from autotune.integrations.sections import loader_section, step_section, trials_table
from autotune.integrations.store import StoredOwn, read_own
from autotune.machine.host import Host
from autotune.machine.measured_device import open_device
from autotune.profiles.checks import Check, Verification
from autotune.profiles.decide.fingerprint_check import check_fields, field_text
from autotune.profiles.decide.follow_up import command
from autotune.profiles.fingerprint_table import fingerprint_table
from autotune.profiles.recorded_trials import read_trials
from autotune.profiles.review_text import approval_line
from autotune.trials.fingerprint import fingerprint
from trainer.formats.nvml import GpuMonitor

if TYPE_CHECKING:
    from autotune.base.tables import Row


def verify_own(
    stored: StoredOwn,
    host: Host,
    monitor: GpuMonitor,
    read_cuda: Callable[[], str | None],
) -> Verification:
    """Compare a profile with this machine, as ``approval.verify``.

    Your source is not imported.
    """
    made_on = stored.profile.fingerprint
    site = open_device(
        "auto" if made_on.device == "cuda" else "cpu",
        stored.path.parent,
        host,
        monitor,
        measures=False,
    )
    here = fingerprint(
        site,
        made_on.model_sha256,
        None,
        read_cuda() if site.device == "cuda" else made_on.cuda,
    )
    why = "your code is not imported to check it"
    source = Check(
        field="source", found="info", profile=field_text(made_on.model_sha256), here=why
    )
    checks = check_fields(made_on, here, {})
    return Verification(
        checks=tuple(source if one.field == "model_sha256" else one for one in checks)
    )


def own_report(
    paths: Sequence[Path], reports: Path
) -> tuple[doc.Document, dict[str, Any]]:
    """Return the report of profiles of your own code, and its facts for machines."""
    stored = [read_own(path, reports) for path in paths]
    sections = [
        section
        for number, one in enumerate(stored)
        for section in _sections(one, reports, number)
    ]
    made_on = fingerprint_table(
        [one.profile.fingerprint for one in stored], [path.stem for path in paths]
    )
    sections.append(doc.Section(title="Machine", key="machine", blocks=(made_on,)))
    first, created_utc = (
        stored[0].profile.fingerprint,
        stored[0].profile.provenance.created_utc,
    )
    known = (
        "Memory is that of torch's allocator."
        if first.bytes_known == "allocator"
        else "Measured."
    )
    place = first.gpu_name or first.cpu_model or first.device
    subtitle = f"{place}, torch {first.torch}, {created_utc[:10]}. {known}"
    title = "Tuning report: your own training code"
    told = [
        {
            "path": str(one.path),
            **jsonable(one.profile),
            "intact": one.intact,
            "approval": one.approval.state,
        }
        for one in stored
    ]
    return doc.Document(title=title, subtitle=subtitle, sections=tuple(sections)), {
        "profiles": told
    }


def _sections(one: StoredOwn, reports: Path, number: int) -> Iterator[doc.Section]:
    """Yield the sections on one profile."""
    profile, subject, provenance = (
        one.profile,
        one.profile.subject,
        one.profile.provenance,
    )
    trials = read_trials(one.path, profile, reports)
    fixed = [f"{name}={value}" for name, value in subject.arguments.items()] or None
    known = {
        "probe": command("probe", step=subject.step_function, set=fixed, out=one.path),
        "workers": command("workers", one.path, loader=subject.loader_function),
    }
    commands = [known[name] for name in provenance.commands if name in known]
    approve = command("profile approve", one.path, by="NAME")
    rows: list[Row] = [
        ["profile", str(one.path)],
        ["profile, hash of its content", one.approval.present_sha256],
        ["source of the step, hash", subject.step_sha256],
        ["source of the loader, hash", subject.loader_sha256],
        ["trials, hash", provenance.trial_log_sha256],
        ["compared with the trial log", trials.check.found],
        ["written", provenance.created_utc],
        ["SLURM job", provenance.slurm_job_id],
    ]
    tuned = " · ".join(f"{name} {value}" for name, value in profile.tuned.items())
    answer = doc.Paragraph(words=(doc.Strong(text=tuned),), large=True)
    reproduce = doc.Bullets(
        items=tuple((doc.Code(text=text),) for text in (*commands, approve))
    )
    parts: dict[str, tuple[str, tuple[doc.Block, ...]]] = {
        "answer": (
            "",
            (answer, doc.Pairs(pairs=(("Approval", (approval_line(one.approval),)),))),
        ),
        "memory": ("Memory: ", step_section(profile)),
        "workers": ("Data loading: ", loader_section(profile)),
        "trials": ("Trials: ", (trials_table(trials.finished),)),
        "reproduce": (
            "Reproduce and approve: ",
            (reproduce, facts_table("Identifiers", rows)),
        ),
    }
    for key, (name, blocks) in parts.items():
        yield doc.Section(
            title=f"{name}{subject.words}", key=f"{key}-{number}", blocks=blocks
        )
