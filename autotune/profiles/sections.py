"""Text and report blocks of a profile: settings, verification, approval and the origin of its figures."""

from autotune.base.document import Block, Bullets, Code, Missing, Pairs, Paragraph, Strong, Table, Words, facts
from autotune.base.render import console_text
from autotune.base.tables import Row
from autotune.base.units import format_bytes, format_count
from autotune.profiles.decide.batch_split import DEFAULT_GLOBAL_BATCH_TOKENS
from autotune.profiles.decide.follow_up import probe_again
from autotune.profiles.values import Approval, Profile, TrialLogCheck, Verification, is_sha256
from autotune.report.values import ReportedProfile
from trainer.config.presets import PRESETS

_SHOWN_DIGITS, _SIDE_CHARACTERS = 12, 40
_EDITED = {True: "as written", False: "edited by hand since it was written"}
_WORDS = {"refuse": "differs: refused", "warn": "differs: mind it", "inform": "differs"}
_FIELDS = {
    "device": "device", "gpu_name": "GPU", "gpu_count": "GPUs", "gpu_total_bytes": "memory of a GPU",
    "gpu_mig": "GPU partitioned (MIG)", "gpu_power_cap_w": "power cap of a GPU, W", "driver": "driver", "cuda": "CUDA",
    "torch": "torch", "transformers": "transformers", "python": "Python", "cpu_model": "CPU",
    "allotted_cpus": "CPUs allotted", "ram_total_bytes": "memory of the host",
    "data_filesystem": "file system of the data", "model_sha256": "model config, SHA-256",
    "dataset_hash": "dataset, hash",
}  # fmt: skip


def profile_text(profile: Profile, approval: Approval, *, intact: bool) -> str:
    """Return each setting with its value and reason, then the machine it was measured on, and its approval."""
    train, probe, workers = profile.train, profile.evidence.probe, profile.evidence.workers
    dropout = train.attention_dropout
    changes = [] if dropout is None else [["attention dropout", f"{dropout:g}", "a change of recipe, as asked for"]]
    decisions: list[Row] = [
        ["model", train.model.name, f"{train.precision}, {train.layout} rows of {train.seq_length_tokens} tokens"],
        *changes,
        ["micro-batch rows", str(train.micro_batch_size), probe.choice if probe else "not measured: autotune probe"],
        [
            "global batch rows",
            str(train.global_batch_size),
            f"about {global_batch_words(profile.constraints.global_batch_tokens)} a step",
        ],
        [
            "loader workers",
            str(train.data.num_workers),
            workers.choice if workers else "not measured: autotune workers",
        ],
        *_gradient_sync_rows(profile),
        ["memory budget", format_bytes(profile.constraints.memory_budget_bytes), "per rank"],
    ]
    here = profile.fingerprint
    place = f"{here.gpu_name or here.cpu_model or here.device}, torch {here.torch}, {profile.provenance.created_utc}"
    origin = (("measured on", (place,)), ("content", (_EDITED[intact],)), ("approval", (approval_line(approval),)))
    table = Table(caption="", headers=("setting", "value", "why"), rows=tuple(decisions))
    return console_text((table, Pairs(pairs=origin)))


def _gradient_sync_rows(profile: Profile) -> list[list[str | None]]:
    """Return the rows on gradient synchronisation; none if it was not measured and is at its defaults."""
    parallel, network = profile.train.parallel, profile.evidence.network
    if network is None and parallel == type(parallel)():
        return []
    kind = "hsdp" if parallel.shard_ranks is not None else parallel.strategy
    cap = "" if parallel.strategy == "fsdp2" else f", {parallel.bucket_cap_mib} MiB buckets"
    why = network.choice if network is not None else "not measured: autotune network"
    rows: list[list[str | None]] = [["exchange of gradients", f"{kind}, {parallel.gradient_dtype}{cap}", why]]
    if network is not None and network.useful_nodes is not None:
        efficient = "at least 90 % efficient at this global batch; predicted"
        rows.append(["useful nodes", str(network.useful_nodes), efficient])
    return rows


def verification_text(verification: Verification, approval: Approval, *, intact: bool) -> str:
    """Return every check, then the state of the profile's content, trial log and approval."""
    rows: list[Row] = [
        [
            check.field,
            _WORDS.get(check.found, check.found),
            cut(check.profile),
            "" if check.found == "same" else cut(check.here, whole=check.found == "not checkable here"),
        ]
        for check in verification.checks
    ]
    edited = _EDITED[intact] + ("" if intact else ", so its figures may be of other settings")
    table = Table(caption="", headers=("what", "result", "in the profile", "here"), rows=tuple(rows))
    trial_log = () if verification.trial_log is None else (("trial log", (trial_log_words(verification.trial_log),)),)
    content = ("content", (f"{short(approval.present_sha256)}, {edited}",))
    return console_text((table, Pairs(pairs=(content, *trial_log, ("approval", (approval_line(approval),))))))


def trial_log_words(found: TrialLogCheck) -> str:
    """Return the result of a trial log check on one line."""
    if found.found == "no trials":
        others = f": {found.others} trials there are another profile's" if found.others else ""
        return f"not checkable here: no trial of it is in its trial log{others}"
    said = {
        "same": f"matches: the {found.trials} trials it rests on are as they were",
        "differs": "does not match: trials it rests on were changed, lost or put in since, or the profile's hash was",
        "not recomputable": "its hash cannot be recomputed: it was written before profiles said which trials it is of",
    }[found.found]
    said += f"; {found.added} were added since" if found.added else ""
    if found.unfounded:
        return f"{said}; no trial there gave {', '.join(found.unfounded)}"
    return f"{said}; its largest micro-batch and its speeds are those of trials there"


def cut(text: str, *, whole: bool = False) -> str:
    """Shorten a hash, and a long text unless ``whole`` is set."""
    if is_sha256(text):
        return short(text)
    return text if whole or len(text) <= _SIDE_CHARACTERS else f"{text[:_SIDE_CHARACTERS]}…"


def approval_line(approval: Approval) -> str:
    """Return a profile's approval on one line."""
    last = approval.review
    if last is None:
        return "not reviewed"
    who, before = f"by {last.by} at {last.time_utc}", short(last.profile_sha256)
    if approval.state == "voided":
        now = short(approval.present_sha256)
        return f"voided: {before} was approved {who}; the profile was edited since, and is {now} now"
    if approval.state == "not reviewed":
        return f"not reviewed (what it said before, {before}, was rejected by {last.by})"
    edited, note = ", as edited by hand" if last.as_edited else "", f": {last.note}" if last.note else ""
    return f"{approval.state}{edited} {who}{note}"


def review_text(name: str, approval: Approval, *, intact: bool) -> str:
    """Return a profile's name, content hash and approval."""
    content = f"{short(approval.present_sha256)}, {_EDITED[intact]}"
    pairs = (("profile", (name,)), ("content", (content,)), ("approval", (approval_line(approval),)))
    return console_text((Pairs(pairs=pairs),))


def short(sha256: str) -> str:
    """Return the first 12 digits of a hash, enough to tell it from others."""
    return sha256[:_SHOWN_DIGITS]


def machine(profiles: tuple[ReportedProfile, ...]) -> tuple[Block, ...]:
    """Return a table with the fingerprints of all profiles side by side."""
    made_on = [one.profile.fingerprint for one in profiles]
    cells = {name: [_shown(field, getattr(one, field)) for one in made_on] for field, name in _FIELDS.items()}
    rows = tuple([name, *found] for name, found in cells.items() if any(found))
    return (Table(caption="The machine", headers=("what", *(one.title for one in profiles)), rows=rows),)


def _shown(field: str, value: object) -> str | None:
    if value is None:
        return None
    if field.endswith("_bytes") and isinstance(value, int):
        return format_bytes(value)
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def reproduce(one: ReportedProfile) -> tuple[Block, ...]:
    """Return the commands that measure the same again, and the hashes to compare."""
    provenance = one.profile.provenance
    items: tuple[Words, ...] = tuple((Code(text=command),) for command in commands(one))
    edited: Words = () if one.intact else (" ", Strong(text="The profile was edited by hand after it was written."))
    rows: list[list[str | None]] = [
        ["profile", str(one.path)],
        ["profile, hash of its content", one.content_sha256],
        ["trials it rests on, hash", provenance.trial_log_sha256],
        ["held against the trial log", None if one.trial_log is None else trial_log_words(one.trial_log)],
        ["model config, hash", one.profile.fingerprint.model_sha256],
        ["dataset, hash", one.profile.fingerprint.dataset_hash],
        ["written", provenance.created_utc],
        ["written by", f"encoder-autotune {provenance.tool_version}: {', '.join(provenance.commands)}"],
        ["SLURM job", provenance.slurm_job_id],
        ["seed", str(one.profile.train.seed)],
    ]
    said: Words = ("With the same machine, dataset and versions, in this order:", *edited)
    return (Paragraph(words=said), Bullets(items=items), facts("What names this tuning", rows))


def commands(one: ReportedProfile) -> list[str]:
    """Return the commands that tuned the profile, with its own settings, in the same order."""
    train, probe = one.profile.train, one.profile.evidence.probe
    ranks = "" if probe is None else f" --ranks {probe.local_ranks}"
    model = one.name if one.name in PRESETS else f"{one.name}/config.json"
    known = {
        "probe": probe_again(train, one.profile, model=model, out=one.path),
        "workers": f"autotune workers --profile {one.quoted} --data DIR{ranks}",
        "network": f"autotune network --profile {one.quoted} --data DIR",
        "baseline": f"autotune baseline --profile {one.quoted} --data DIR{ranks}",
        "advise": f"autotune advise {one.quoted} --apply",
    }
    # A profile may name anything there; only this program's commands are shown as such.
    return [known[name] for name in dict.fromkeys(one.profile.provenance.commands) if known.get(name)]


def sign_off(one: ReportedProfile) -> tuple[Block, ...]:
    """Return a profile's approval or, if it was not reviewed, the command that approves it."""
    approval = one.approval
    if approval is None or approval.state == "not reviewed":
        command = f"autotune profile approve {one.quoted} --by NAME"
        return (Missing(what="This tuning", state="not reviewed", commands=(command,)),)
    return (Pairs(pairs=(("Sign-off", (approval_line(approval),)),)),)


def global_batch_words(tokens: int) -> str:
    """Format a global batch in tokens, and note whether it is the default."""
    known = "the default" if tokens == DEFAULT_GLOBAL_BATCH_TOKENS else "as asked for"
    return f"{format_count(tokens)} real tokens ({known})"
