"""The estimate that wrote a profile, as a shell takes it. Pure."""

import shlex

from autotune.core.evidence import EstimateEvidence
from autotune.core.profile import Profile
from autotune.core.units import exact_bytes
from autotune.decide.probe_command import takes_the_whole_card


def estimate_command(profile: Profile, estimate: EstimateEvidence, path: str, *, model: str) -> str:
    """The command that predicts the same again.

    Args:
        profile: The profile.
        estimate: Of the profile.
        path: Where it lies.
        model: A preset, or the file of a config.
    """
    train, constraints = profile.train, profile.constraints
    tokens = train.global_batch_tokens if estimate.rows_assumed else constraints.global_batch_tokens
    options: dict[str, object] = {
        "model": model,
        "gpu": estimate.card,
        "memory": None if takes_the_whole_card(profile) else exact_bytes(constraints.memory_budget_bytes),
        "device": "cpu" if train.device == "cpu" else None,
        "data": None if estimate.rows_assumed else "DIR",
        "vocab-size": estimate.vocab_size if estimate.rows_assumed else None,
        "seq-length": train.seq_length_tokens,
        "layout": train.layout,
        "precision": train.precision,
        "attention": train.attention,
        "attention-dropout": train.attention_dropout,
        "checkpointing": train.checkpointing,
        "head": train.head,
        "ranks": estimate.local_ranks,
        "global-batch-tokens": tokens,
        "headroom": constraints.headroom_share,
        "out": path,
    }
    words = [word for name, value in options.items() if value is not None for word in (f"--{name}", str(value))]
    return shlex.join(
        ["autotune", "estimate", *words, *([] if estimate.micro_batches_per_step > 1 else ["--no-accumulate"])]
    )
