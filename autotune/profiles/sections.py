"""Text and report blocks of a profile: its settings, machine and approval."""

from collections.abc import Iterator, Sequence

from autotune.base.document import Block, Missing, Pairs, Table
from autotune.base.render_console import console_text
from autotune.base.tables import Row
from autotune.base.units import format_bytes, format_count
from autotune.profiles.decide.batch_split import (
    DEFAULT_GLOBAL_BATCH_TOKENS,
    SPLIT_FACTORS,
    split_global_batch,
)
from autotune.profiles.review_text import approval_line, content_state
from autotune.profiles.values import Approval, Fingerprint, Profile
from autotune.report.values import ReportedProfile
from trainer.config.train_config import ParallelSettings

# Fields of a fingerprint, in the order in which reports show them.
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
        ("content", (content_state(intact=intact),)),
        ("approval", (approval_line(approval),)),
    )
    return console_text((table, Pairs(pairs=pairs)))


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
    if network is None and parallel == ParallelSettings():
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
    """Return a value of a fingerprint as a report shows it; None if it has none."""
    if value is None:
        return None
    if isinstance(value, bool):
        return "yes" if value else "no"
    if field.endswith("_bytes") and isinstance(value, int):
        return format_bytes(value)
    return str(value)


def approval_blocks(reported: ReportedProfile) -> tuple[Block, ...]:
    """Return a profile's approval, or the command that approves it if not reviewed."""
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
