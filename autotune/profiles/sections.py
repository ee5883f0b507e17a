"""Text and report blocks of a profile: settings, verification, approval and the origin of its figures."""

from collections.abc import Sequence

from autotune.base.document import (
    Block,
    Bullets,
    Code,
    Missing,
    Pairs,
    Paragraph,
    Strong,
    Table,
    Words,
    facts_table,
)
from autotune.base.render import console_text
from autotune.base.tables import Row
from autotune.base.units import format_bytes, format_count
from autotune.profiles.decide.batch_split import DEFAULT_GLOBAL_BATCH_TOKENS
from autotune.profiles.decide.follow_up import probe_again
from autotune.profiles.values import (
    Approval,
    Fingerprint,
    Profile,
    TrialLogCheck,
    Verification,
    is_sha256,
)
from autotune.report.values import ReportedProfile
from trainer.config.presets import PRESETS

_SHOWN_DIGITS, _SIDE_CHARACTERS = 12, 40
_EDITED = {True: "unmodified", False: "modified since it was written"}
_WORDS = {
    "error": "differs (error)",
    "warning": "differs (warning)",
    "info": "differs (info)",
}
_FIELDS = {
    "device": "device",
    "gpu_name": "GPU",
    "gpu_count": "GPUs",
    "gpu_total_bytes": "GPU memory",
    "gpu_mig": "MIG enabled",
    "gpu_power_cap_w": "GPU power limit, W",
    "driver": "driver",
    "cuda": "CUDA",
    "torch": "torch",
    "transformers": "transformers",
    "python": "Python",
    "cpu_model": "CPU",
    "allotted_cpus": "available CPU cores",
    "ram_total_bytes": "host memory",
    "data_filesystem": "file system of the data",
    "model_sha256": "model config, SHA-256",
    "dataset_hash": "dataset, hash",
}


def profile_text(profile: Profile, approval: Approval, *, intact: bool) -> str:
    """Return each setting with its value and reason, then the machine it was measured on, and its approval."""
    train, probe, workers = (
        profile.train,
        profile.evidence.probe,
        profile.evidence.workers,
    )
    counted = workers.choice if workers else "not measured: autotune workers"
    dropout, tokens = train.attention_dropout, profile.constraints.global_batch_tokens
    changes = (
        []
        if dropout is None
        else [["attention dropout", f"{dropout:g}", "set by you; changes the recipe"]]
    )
    decisions: list[Row] = [
        [
            "model",
            train.model.name,
            (
                f"{train.precision}, {train.layout} sequences of"
                f" {train.seq_length_tokens} tokens"
            ),
        ],
        *changes,
        [
            "micro-batch size",
            str(train.micro_batch_size),
            probe.choice if probe else "not measured: autotune probe",
        ],
        [
            "global batch size",
            str(train.global_batch_size),
            f"about {global_batch_words(tokens)} per step",
        ],
        ["DataLoader workers", str(train.data.num_workers), counted],
        *_gradient_sync_rows(profile),
        [
            "memory budget",
            format_bytes(profile.constraints.memory_budget_bytes),
            "per rank",
        ],
    ]
    here = profile.fingerprint
    place = (
        f"{here.gpu_name or here.cpu_model or here.device}, torch {here.torch},"
        f" {profile.provenance.created_utc}"
    )
    origin = (
        ("measured on", (place,)),
        ("content", (_EDITED[intact],)),
        ("approval", (approval_line(approval),)),
    )
    table = Table(
        caption="", headers=("setting", "value", "why"), rows=tuple(decisions)
    )
    return console_text((table, Pairs(pairs=origin)))


def _gradient_sync_rows(profile: Profile) -> list[list[str | None]]:
    """Return the rows on gradient synchronisation.

    None if it was not measured and is at its defaults.
    """
    parallel, network = profile.train.parallel, profile.evidence.network
    if network is None and parallel == type(parallel)():
        return []
    kind = "hsdp" if parallel.shard_ranks is not None else parallel.strategy
    cap = (
        ""
        if parallel.strategy == "fsdp2"
        else f", {parallel.bucket_cap_mib} MiB buckets"
    )
    why = network.choice if network is not None else "not measured: autotune network"
    rows: list[list[str | None]] = [
        ["gradient synchronisation", f"{kind}, {parallel.gradient_dtype}{cap}", why]
    ]
    if network is not None and network.useful_nodes is not None:
        efficient = "predicted: at least 90 % efficient at this global batch"
        rows.append(["max. nodes", str(network.useful_nodes), efficient])
    return rows


def verification_text(
    verification: Verification,
    trial_log: TrialLogCheck,
    approval: Approval,
    *,
    intact: bool,
) -> str:
    """Return every check, then the state of the profile's content, trial log and approval."""
    rows: list[Row] = [
        [
            check.field,
            _WORDS.get(check.found, check.found),
            cut(check.profile),
            (
                ""
                if check.found == "same"
                else cut(check.here, whole=check.found == "unknown")
            ),
        ]
        for check in verification.checks
    ]
    edited = _EDITED[intact] + (
        "" if intact else ", so its figures may not hold for its settings"
    )
    table = Table(
        caption="",
        headers=("field", "result", "in the profile", "here"),
        rows=tuple(rows),
    )
    content, found = (
        f"{short(approval.present_sha256)}, {edited}",
        trial_log_words(trial_log),
    )
    pairs = (
        ("content", (content,)),
        ("trial log", (found,)),
        ("approval", (approval_line(approval),)),
    )
    return console_text((table, Pairs(pairs=pairs)))


def trial_log_words(found: TrialLogCheck) -> str:
    """Return the result of a trial log check on one line."""
    if found.found == "no trials":
        others = (
            f"; {found.others} trials there are another profile's"
            if found.others
            else ""
        )
        return f"unknown: the trial log holds no trial of this profile{others}"
    said = {
        "same": f"the hash of {found.trials} trials matches",
        "differs": (
            "the hash does not match: trials or the hash were changed, removed or added"
        ),
        "not recomputable": (
            "the hash cannot be recomputed: the profile is of an older version"
        ),
    }[found.found]
    said += f"; {found.added} trials were added later" if found.added else ""
    if found.unfounded:
        return f"{said}; no trial matches {', '.join(found.unfounded)}"
    return f"{said}; the largest micro-batch and all rates match trials"


def cut(text: str, *, whole: bool = False) -> str:
    """Shorten a hash, and a long text unless ``whole`` is set."""
    if is_sha256(text):
        return short(text)
    return (
        text
        if whole or len(text) <= _SIDE_CHARACTERS
        else f"{text[:_SIDE_CHARACTERS]}…"
    )


def approval_line(approval: Approval) -> str:
    """Return a profile's approval on one line."""
    last = approval.review
    if last is None:
        return "not reviewed"
    who, before = f"by {last.by} at {last.time_utc}", short(last.profile_sha256)
    if approval.state == "voided":
        now = short(approval.present_sha256)
        return f"voided: approved {who}, modified since (hash {before} then, {now} now)"
    if approval.state == "not reviewed":
        return (
            f"not reviewed (its earlier content, {before}, was rejected by {last.by})"
        )
    edited, note = (
        " (modified content)" if last.as_edited else "",
        f": {last.note}" if last.note else "",
    )
    return f"{approval.state}{edited} {who}{note}"


def review_text(name: str, approval: Approval, *, intact: bool) -> str:
    """Return a profile's name, content hash and approval."""
    content = f"{short(approval.present_sha256)}, {_EDITED[intact]}"
    pairs = (
        ("profile", (name,)),
        ("content", (content,)),
        ("approval", (approval_line(approval),)),
    )
    return console_text((Pairs(pairs=pairs),))


def short(sha256: str) -> str:
    """Return the first 12 digits of a hash, enough to tell it from others."""
    return sha256[:_SHOWN_DIGITS]


def fingerprint_table(made_on: Sequence[Fingerprint], titles: Sequence[str]) -> Table:
    """Return a table of fingerprints side by side."""
    cells = {
        name: [_shown(field, getattr(one, field)) for one in made_on]
        for field, name in _FIELDS.items()
    }
    rows = tuple([name, *found] for name, found in cells.items() if any(found))
    return Table(caption="Machine", headers=("field", *titles), rows=rows)


def _shown(field: str, value: object) -> str | None:
    if value is None:
        return None
    if field.endswith("_bytes") and isinstance(value, int):
        return format_bytes(value)
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def reproduction_blocks(one: ReportedProfile) -> tuple[Block, ...]:
    """Return the commands that repeat the measurements, and the hashes to compare."""
    provenance = one.profile.provenance
    items: tuple[Words, ...] = tuple(
        (Code(text=command),) for command in tuning_commands(one)
    )
    edited: Words = (
        ()
        if one.intact
        else (" ", Strong(text="The profile was modified after it was written."))
    )
    rows: list[list[str | None]] = [
        ["profile", str(one.path)],
        ["profile, hash of its content", one.content_sha256],
        ["trials, hash", provenance.trial_log_sha256],
        [
            "compared with the trial log",
            None if one.trial_log is None else trial_log_words(one.trial_log),
        ],
        ["model config, hash", one.profile.fingerprint.model_sha256],
        ["dataset, hash", one.profile.fingerprint.dataset_hash],
        ["written", provenance.created_utc],
        [
            "written by",
            (
                f"encoder-autotune {provenance.tool_version}:"
                f" {', '.join(provenance.commands)}"
            ),
        ],
        ["SLURM job", provenance.slurm_job_id],
        ["seed", str(one.profile.train.seed)],
    ]
    said: Words = (
        "Run in this order, on the same machine, dataset and versions:",
        *edited,
    )
    return (
        Paragraph(words=said),
        Bullets(items=items),
        facts_table("Identifiers of this tuning", rows),
    )


def tuning_commands(one: ReportedProfile) -> list[str]:
    """Return the commands that tuned the profile, with its own settings, in the same order."""
    train, probe = one.profile.train, one.profile.evidence.probe
    ranks = "" if probe is None else f" --ranks {probe.local_ranks}"
    model = one.name if one.name in PRESETS else f"{one.name}/config.json"
    options = {
        "workers": f"--data DIR{ranks}",
        "network": "--data DIR",
        "baseline": f"--data DIR{ranks}",
    }
    known = {
        name: f"autotune {name} {one.quoted} {text}"
        for name, text in (options | {"advise": "--apply"}).items()
    }
    known["probe"] = probe_again(train, one.profile, model=model, out=one.path)
    # A profile may name anything there; only this program's commands are shown as such.
    return [
        known[name]
        for name in dict.fromkeys(one.profile.provenance.commands)
        if known.get(name)
    ]


def approval_blocks(one: ReportedProfile) -> tuple[Block, ...]:
    """Return a profile's approval or, if it was not reviewed, the command that approves it."""
    approval = one.approval
    if approval is None or approval.state == "not reviewed":
        command = f"autotune profile approve {one.quoted} --by NAME"
        return (Missing(subject="Approval", state="not reviewed", commands=(command,)),)
    return (Pairs(pairs=(("Approval", (approval_line(approval),)),)),)


def global_batch_words(tokens: int) -> str:
    """Format a global batch in tokens, and note whether it is the default."""
    known = "the default" if tokens == DEFAULT_GLOBAL_BATCH_TOKENS else "set by you"
    return f"{format_count(tokens)} non-padding tokens ({known})"
