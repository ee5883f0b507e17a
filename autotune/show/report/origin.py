"""Where figures come from: the machine, how to get them again, and who signed them off."""

from autotune.core.units import format_bytes
from autotune.decide.probe_command import probe_again
from autotune.show.report.document import Block, Bullets, Code, Missing, Pairs, Paragraph, Strong, Table, Words
from autotune.show.report.inputs import ReportedProfile
from autotune.show.verification import ledger_words
from trainer.presets import PRESETS

_FIELDS = {
    "device": "device", "gpu_name": "GPU", "gpu_count": "GPUs", "gpu_total_bytes": "memory of a GPU",
    "gpu_mig": "GPU partitioned (MIG)", "gpu_power_cap_w": "power cap of a GPU, W", "driver": "driver", "cuda": "CUDA",
    "torch": "torch", "transformers": "transformers", "python": "Python", "cpu_model": "CPU",
    "allotted_cpus": "CPUs allotted", "ram_total_bytes": "memory of the host",
    "data_filesystem": "file system of the data", "model_sha256": "model config, SHA-256",
    "dataset_hash": "dataset, hash",
}  # fmt: skip


def machine(profiles: tuple[ReportedProfile, ...]) -> tuple[Block, ...]:
    """The fingerprint of each profile, side by side."""
    found = {
        name: [_shown(field, getattr(one.profile.fingerprint, field)) for one in profiles]
        for field, name in _FIELDS.items()
    }
    rows = tuple([name, *values] for name, values in found.items())
    return (Table(caption="The machine", headers=("what", *(one.title for one in profiles)), rows=rows),)


def _shown(field: str, value: object) -> str | None:
    if value is None:
        return None
    if field.endswith("_bytes") and isinstance(value, int):
        return format_bytes(value)
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def reproduce(one: ReportedProfile) -> tuple[Block, ...]:
    """Commands that measure the same again, and the hashes that say whether it is the same."""
    provenance = one.profile.provenance
    items: tuple[Words, ...] = tuple((Code(text=command),) for command in commands(one))
    edited: Words = () if one.intact else (Strong(text=" The profile was edited by hand after it was written."),)
    rows: list[list[str | None]] = [
        ["profile", str(one.path)],
        ["profile, hash of its content", one.content_sha256],
        ["trials it rests on, hash", provenance.ledger_sha256],
        ["held against the ledger", None if one.ledger is None else ledger_words(one.ledger)],
        ["model config, hash", one.profile.fingerprint.model_sha256],
        ["dataset, hash", one.profile.fingerprint.dataset_hash],
        ["written", provenance.created_utc],
        ["written by", f"encoder-autotune {provenance.tool_version}: {', '.join(provenance.commands)}"],
        ["SLURM job", provenance.slurm_job_id],
        ["seed", str(one.profile.train.seed)],
    ]
    said: Words = ("With the same machine, dataset and versions, in this order:", *edited)
    return (
        Paragraph(words=said),
        Bullets(items=items),
        Table(caption="What names this tuning", headers=("what", "value"), rows=tuple(rows)),
    )


def commands(one: ReportedProfile) -> list[str]:
    """As the profile's own settings have them, in the order of tuning."""
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
    """The last verdict on it."""
    standing = one.standing
    if standing is None or standing.review is None or standing.state == "not reviewed":
        command = f"autotune report review {one.quoted} --approve --by NAME"
        return (Missing(what="This tuning", state="not reviewed", commands=(command,)),)
    review, edited = standing.review, ", as edited by hand" if standing.review.as_edited else ""
    state = "approved before it was edited, and so void" if standing.state == "voided" else standing.state + edited
    pairs: list[tuple[str, Words]] = [
        ("State", (Strong(text=state),)), ("By", (review.by,)), ("When", (review.time_utc,)),
    ]  # fmt: skip
    return (Pairs(pairs=(*pairs, *([("Note", (review.note,))] if review.note else []))),)
