"""Text and report blocks of a profile.

They are on its settings, verification and approval, and the origin of its figures.
"""

import shlex
from collections.abc import Iterator, Sequence

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
from autotune.base.wording import plural
from autotune.profiles.decide.batch_split import (
    DEFAULT_GLOBAL_BATCH_TOKENS,
    SPLIT_FACTORS,
    split_global_batch,
)
from autotune.profiles.decide.follow_up import probe_again
from autotune.profiles.values import (
    Approval,
    Check,
    Fingerprint,
    Profile,
    TrialLogCheck,
    Verification,
    is_sha256,
)
from autotune.report.values import ReportedProfile
from trainer.config.presets import PRESETS

_HASH_DIGITS = 12
_MOST_CHARACTERS = 40
"""Longest value of a check, in characters; longer ones are cut."""
_RESULT_WORDS = {
    "error": "differs (error)",
    "warning": "differs (warning)",
    "info": "differs (info)",
}
"""Words for the results of a check; other results are shown as they are."""
_FIELD_NAMES = {
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
    """Return a profile's settings, with their reasons, and its origin and approval."""
    table = Table(
        caption="",
        headers=("setting", "value", "why"),
        rows=tuple(_setting_rows(profile)),
    )
    made_on = profile.fingerprint
    device_name = made_on.gpu_name or made_on.cpu_model or made_on.device
    machine = f"{device_name}, torch {made_on.torch}, {profile.provenance.created_utc}"
    pairs = (
        ("measured on", (machine,)),
        ("content", (_content_state(intact=intact),)),
        ("approval", (approval_line(approval),)),
    )
    return console_text((table, Pairs(pairs=pairs)))


def _content_state(*, intact: bool) -> str:
    return "unmodified" if intact else "modified since it was written"


def _setting_rows(profile: Profile) -> Iterator[Row]:
    """Yield each setting that tuning decides, with its value and reason."""
    train = profile.train
    sequences = (
        f"{train.precision}, {train.layout} sequences of"
        f" {train.seq_length_tokens} tokens"
    )
    yield ["model", train.model.name, sequences]
    if train.attention_dropout is not None:
        dropout = f"{train.attention_dropout:g}"
        yield ["attention dropout", dropout, "set by you; changes the recipe"]
    probe = profile.evidence.probe
    yield [
        "micro-batch size",
        str(train.micro_batch_size),
        "not measured: autotune probe" if probe is None else probe.choice,
    ]
    tokens = global_batch_words(profile.constraints.global_batch_tokens)
    yield [
        "global batch size",
        str(train.global_batch_size),
        f"{_split_words(profile)}about {tokens} per step",
    ]
    workers = profile.evidence.workers
    yield [
        "DataLoader workers",
        str(train.data.num_workers),
        "not measured: autotune workers" if workers is None else workers.choice,
    ]
    yield from _gradient_sync_rows(profile)
    budget = format_bytes(profile.constraints.memory_budget_bytes)
    yield ["memory budget", budget, "per rank"]


def _split_words(profile: Profile) -> str:
    """Return the batch split of a profile; empty if its batch cannot be split."""
    train = profile.train
    ranks = profile.local_ranks
    if train.global_batch_size < ranks:
        return ""
    split = split_global_batch(train.global_batch_size, train.micro_batch_size, ranks)
    return f"{split.words(ranks)} ({SPLIT_FACTORS}), "


def _gradient_sync_rows(profile: Profile) -> Iterator[Row]:
    """Yield the rows on gradient synchronisation.

    There are none if it was not measured and is at its defaults.
    """
    parallel = profile.train.parallel
    network = profile.evidence.network
    if network is None and parallel == type(parallel)():
        return
    strategy = "hsdp" if parallel.shard_ranks is not None else parallel.strategy
    settings = f"{strategy}, {parallel.gradient_dtype}"
    if parallel.strategy != "fsdp2":
        settings += f", {parallel.bucket_cap_mib} MiB buckets"
    yield [
        "gradient synchronisation",
        settings,
        "not measured: autotune network" if network is None else network.choice,
    ]
    if network is not None and network.useful_nodes is not None:
        efficient = "predicted: at least 90 % efficient at this global batch"
        yield ["max. nodes", str(network.useful_nodes), efficient]


def verification_text(
    verification: Verification,
    trial_log: TrialLogCheck,
    approval: Approval,
    *,
    intact: bool,
) -> str:
    """Return every check, and the state of the content, trial log and approval."""
    table = Table(
        caption="",
        headers=("field", "result", "in the profile", "here"),
        rows=tuple(_check_cells(check) for check in verification.checks),
    )
    content = f"{_short_hash(approval.present_sha256)}, {_content_state(intact=intact)}"
    if not intact:
        content += ", so its figures may not hold for its settings"
    pairs = (
        ("content", (content,)),
        ("trial log", (trial_log_words(trial_log),)),
        ("approval", (approval_line(approval),)),
    )
    return console_text((table, Pairs(pairs=pairs)))


def _check_cells(check: Check) -> Row:
    here = short_value(check.here)
    if check.found == "same":
        here = ""
    elif check.found == "unknown" and not is_sha256(check.here):
        # A reason, which is shown in full.
        here = check.here
    result = _RESULT_WORDS.get(check.found, check.found)
    return [check.field, result, short_value(check.profile), here]


def trial_log_words(check: TrialLogCheck) -> str:
    """Return the result of a trial log check on one line."""
    if check.found == "no trials":
        words = "unknown: the trial log holds no trial of this profile"
        if check.others:
            words += f"; of another profile: {plural(check.others, 'trial')}"
        return words
    words = {
        "same": f"the hash of {plural(check.trials, 'trial')} matches",
        "differs": (
            "the hash does not match: trials or the hash were changed, removed or added"
        ),
        "not recomputable": (
            "the hash cannot be recomputed: the profile is of an older version"
        ),
    }[check.found]
    if check.added:
        words += f"; added later: {plural(check.added, 'trial')}"
    if check.unfounded:
        return f"{words}; no trial matches {', '.join(check.unfounded)}"
    return f"{words}; the largest micro-batch and all rates match trials"


def short_value(text: str) -> str:
    """Shorten a hash or a long text."""
    if is_sha256(text):
        return _short_hash(text)
    if len(text) <= _MOST_CHARACTERS:
        return text
    return f"{text[:_MOST_CHARACTERS]}…"


def approval_line(approval: Approval) -> str:
    """Return a profile's approval on one line."""
    review = approval.review
    if review is None:
        return "not reviewed"
    reviewer = f"by {review.by} at {review.time_utc}"
    reviewed_hash = _short_hash(review.profile_sha256)
    if approval.state == "voided":
        present_hash = _short_hash(approval.present_sha256)
        return (
            f"voided: approved {reviewer}, modified since"
            f" (hash {reviewed_hash} then, {present_hash} now)"
        )
    if approval.state == "not reviewed":
        return (
            f"not reviewed (its earlier content, {reviewed_hash}, was rejected by"
            f" {review.by})"
        )
    edited = " (modified content)" if review.as_edited else ""
    note = f": {review.note}" if review.note else ""
    return f"{approval.state}{edited} {reviewer}{note}"


def review_text(name: str, approval: Approval, *, intact: bool) -> str:
    """Return a profile's name, content hash and approval."""
    content = f"{_short_hash(approval.present_sha256)}, {_content_state(intact=intact)}"
    pairs = (
        ("profile", (name,)),
        ("content", (content,)),
        ("approval", (approval_line(approval),)),
    )
    return console_text((Pairs(pairs=pairs),))


def _short_hash(sha256: str) -> str:
    """Return the first digits of a hash, enough to tell it from others."""
    return sha256[:_HASH_DIGITS]


def fingerprint_table(made_on: Sequence[Fingerprint], titles: Sequence[str]) -> Table:
    """Return a table of fingerprints side by side, without fields that none has."""
    rows = []
    for field, name in _FIELD_NAMES.items():
        cells = [
            _field_text(field, getattr(fingerprint, field)) for fingerprint in made_on
        ]
        if any(cells):
            rows.append([name, *cells])
    return Table(caption="Machine", headers=("field", *titles), rows=tuple(rows))


def _field_text(field: str, value: object) -> str | None:
    if value is None:
        return None
    if isinstance(value, bool):
        return "yes" if value else "no"
    if field.endswith("_bytes") and isinstance(value, int):
        return format_bytes(value)
    return str(value)


def reproduction_blocks(reported: ReportedProfile) -> tuple[Block, ...]:
    """Return the commands that repeat the measurements, and the hashes to compare."""
    where = "" if reported.data is not None else " DIR is the dataset."
    words: Words = (
        "Run in this order, on the same machine, dataset and versions; paths are"
        f" relative to the directory in which the report was built.{where}",
    )
    if not reported.intact:
        warning = Strong(text="The profile was modified after it was written.")
        words = (*words, " ", warning)
    commands = tuning_commands(reported)
    return (
        Paragraph(words=words),
        Bullets(items=tuple((Code(text=command),) for command in commands)),
        facts_table("Identifiers of this tuning", _identifier_rows(reported)),
    )


def _identifier_rows(reported: ReportedProfile) -> list[Row]:
    provenance = reported.profile.provenance
    compared = None
    if reported.trial_log is not None:
        compared = trial_log_words(reported.trial_log)
    commands = ", ".join(provenance.commands)
    return [
        ["profile", str(reported.path)],
        ["profile, hash of its content", reported.content_sha256],
        ["trials, hash", provenance.trial_log_sha256],
        ["compared with the trial log", compared],
        ["model config, hash", reported.profile.fingerprint.model_sha256],
        ["dataset, hash", reported.profile.fingerprint.dataset_hash],
        ["written", provenance.created_utc],
        ["written by", f"encoder-autotune {provenance.tool_version}: {commands}"],
        ["SLURM job", provenance.slurm_job_id],
        ["seed", str(reported.profile.train.seed)],
    ]


def tuning_commands(reported: ReportedProfile) -> list[str]:
    """Return the commands that tuned the profile, with its settings, in their order."""
    profile = reported.profile
    probe = profile.evidence.probe
    data = "DIR" if reported.data is None else str(reported.data)
    data_option = shlex.join(["--data", data])
    data_and_ranks = data_option
    if probe is not None:
        data_and_ranks += f" --ranks {probe.local_ranks}"
    # The profile holds the shape of a model that has no preset.
    model = reported.name if reported.name in PRESETS else str(reported.path)
    commands = {
        "probe": probe_again(
            profile.train, profile, model=model, data=data, out=reported.path
        ),
        "workers": f"autotune workers {reported.quoted} {data_and_ranks}",
        "network": f"autotune network {reported.quoted} {data_option}",
        "baseline": f"autotune baseline {reported.quoted} {data_and_ranks}",
        "advise": f"autotune advise {reported.quoted} --apply",
    }
    # A profile may name anything there; only this program's commands are shown as such.
    names = dict.fromkeys(profile.provenance.commands)
    return [commands[name] for name in names if name in commands]


def approval_blocks(reported: ReportedProfile) -> tuple[Block, ...]:
    """Return a profile's approval, or the command that approves it.

    The command is shown if the profile was not reviewed.
    """
    approval = reported.approval
    if approval is None or approval.state == "not reviewed":
        command = f"autotune profile approve {reported.quoted} --by NAME"
        missing = Missing(subject="Approval", state="not reviewed", commands=(command,))
        return (missing,)
    return (Pairs(pairs=(("Approval", (approval_line(approval),)),)),)


def global_batch_words(tokens: int) -> str:
    """Format a global batch in tokens, and note whether it is the default."""
    origin = "the default" if tokens == DEFAULT_GLOBAL_BATCH_TOKENS else "set by you"
    return f"{format_count(tokens)} non-padding tokens ({origin})"
