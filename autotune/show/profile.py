"""A profile's decisions, as text."""

from autotune.core.profile import Profile
from autotune.core.review import Standing
from autotune.core.units import format_bytes, format_count
from autotune.show.review import standing_line
from autotune.show.tables import inert, text_table
from trainer.config import TrainConfig


def profile_text(profile: Profile, standing: Standing, *, intact: bool) -> str:
    """Each decision with its value and its reason, then where it was measured, and who answers for it."""
    train, probe, workers = profile.train, profile.evidence.probe, profile.evidence.workers
    decisions: list[list[str | None]] = [
        ["model", train.model.name, f"{train.precision}, {train.layout} rows of {train.seq_length_tokens} tokens"],
        *_changes(train),
        ["micro-batch rows", str(train.micro_batch_rows), probe.choice if probe else "not measured: autotune probe"],
        [
            "global batch rows",
            str(train.global_batch_rows),
            f"about {format_count(profile.constraints.global_batch_tokens)} real tokens a step, as asked for",
        ],
        [
            "loader workers",
            str(train.data.loader_workers),
            workers.choice if workers else "not measured: autotune workers",
        ],
        *_exchange(profile),
        ["memory budget", format_bytes(profile.constraints.memory_budget_bytes), "per rank"],
    ]
    return "\n".join(
        [
            text_table(("setting", "value", "why"), decisions),
            "",
            _origin(profile),
            f"content: {'as written' if intact else 'edited by hand since it was written'}",
            f"review: {standing_line(standing)}",
        ]
    )


def _origin(profile: Profile) -> str:
    """Where it was measured, and when."""
    here = profile.fingerprint
    place = here.gpu_name or here.cpu_model or here.device
    return f"measured on: {inert(place)}, torch {inert(here.torch)}, {inert(profile.provenance.created_utc)}"


def _changes(train: TrainConfig) -> list[list[str | None]]:
    """What is not as the model's config has it."""
    if train.attention_dropout is None:
        return []
    return [["attention dropout", f"{train.attention_dropout:g}", "a change of recipe, as asked for"]]


def _exchange(profile: Profile) -> list[list[str | None]]:
    """How ranks work together, where that was measured or is not the default."""
    parallel, network = profile.train.parallel, profile.evidence.network
    if network is None and parallel == type(parallel)():
        return []
    kind = "hsdp" if parallel.shard_ranks is not None else parallel.strategy
    cap = "" if parallel.strategy == "fsdp2" else f", {parallel.bucket_cap_mib} MiB buckets"
    why = network.choice if network is not None else "not measured: autotune network"
    useful = [] if network is None or network.useful_nodes is None else [str(network.useful_nodes)]
    rows: list[list[str | None]] = [["exchange of gradients", f"{kind}, {parallel.gradient_dtype}{cap}", why]]
    return rows + [
        ["useful nodes", nodes, "at least 90 % efficient at this global batch; predicted"] for nodes in useful
    ]
