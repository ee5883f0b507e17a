"""Baselines: transformers' Trainer with its defaults, and the paper's trainer.

Only settings that affect speed change. Model, dataset, sequence length, device and the
non-padding tokens of the global batch stay the same. Both recipes run in this project's
trainer, so the speedup is a lower bound for the original trainers. Everything here is
pure.

The paper's trainer (undertale-re at commit 1dae6f2) also embeds positions in a loop
over samples, and computes attention head by head. It does not fuse its optimizer, and
synchronises twice per step to log.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.base.interval import Interval
from autotune.baseline.values import RecipeName, SettingDifference
from trainer.config.train_config import (
    DataSettings,
    ParallelSettings,
    Tag,
    TrainConfig,
    tagged,
)
from trainer.model.families import FAMILIES

PAPER_WORKERS = 8
"""DataLoader workers per rank in the paper's trainer."""
PRECISE_SHARE = 0.05
"""Half-width of a speedup's 95 % CI, as a share of the speedup, that is precise
enough."""

_OF_SPEED = tagged(TrainConfig, Tag.SPEED)
_OF_LOADING = tagged(DataSettings, Tag.LOADER)
_PLAIN_STEP = {
    "precision": "fp32",
    "residual_dtype": "fp32",
    "float8": "none",
    "tf32": False,
    "mlm_head": "dense",
    "fused_cross_entropy": False,
    "last_layer": "dense",
    "attention": "auto",
    "attention_dropout": None,
    "activation_checkpointing": "none",
    "compile": False,
}
"""Defaults of torch and transformers; attention is SDPA, which ``auto`` selects in
fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Named training configuration to compare."""

    name: RecipeName
    config: TrainConfig
    because: Mapping[str, str]
    """Reasons for settings that are not the recipe's own choice, by key."""


def hf_trainer(tuned: TrainConfig, global_batch_tokens: int) -> Recipe:
    """Return transformers' Trainer with its own defaults.

    Each micro-batch is padded to its longest sample.
    """
    config = _plain(
        tuned, global_batch_tokens, layout="dynamic", micro_batch_size=8, num_workers=0
    )
    return Recipe(name="hf-trainer", config=config, because={})


def paper(
    tuned: TrainConfig, global_batch_tokens: int, most_workers: int, limit: str
) -> Recipe:
    """Return the paper's trainer: samples padded to the full length.

    It has no attention dropout. Its micro-batch starts at the tuned size and is halved
    until it fits. ``most_workers`` limits the DataLoader workers of a rank, for the
    reason in ``limit``.
    """
    workers, rows = min(PAPER_WORKERS, most_workers), tuned.micro_batch_size
    config = _plain(
        tuned,
        global_batch_tokens,
        layout="padded",
        micro_batch_size=rows,
        num_workers=workers,
    )
    because = {}
    if workers < PAPER_WORKERS:
        because["data.num_workers"] = (
            f"the paper's {PAPER_WORKERS} exceed the limit of this machine: {limit}"
        )
    kind = tuned.model.config["model_type"]
    if kind in FAMILIES:
        config = config.model_copy(update={"attention_dropout": 0.0})
    else:
        because["attention_dropout"] = (
            f"the model's own: this setting of {kind} is not known"
        )
    return Recipe(name="paper", config=config, because=because)


def _plain(
    tuned: TrainConfig, global_batch_tokens: int, *, num_workers: int, **step: Any
) -> TrainConfig:
    loading = {name: DataSettings.model_fields[name].default for name in _OF_LOADING}
    parallel = ParallelSettings(
        timeout_s=tuned.parallel.timeout_s, gradient_as_bucket_view=False
    )
    data = tuned.data.model_copy(update=loading | {"num_workers": num_workers})
    batch = {"global_batch_tokens": global_batch_tokens, "global_batch_samples": None}
    return tuned.model_copy(
        update=_PLAIN_STEP | step | batch | {"data": data, "parallel": parallel}
    )


def differences(
    recipe: Recipe, tuned: TrainConfig, local_ranks: int
) -> list[SettingDifference]:
    """Return differences from the tuned settings that affect speed.

    With one rank, settings of gradient synchronisation are left out.
    """
    ours = _flat(tuned, local_ranks)
    return [
        SettingDifference(
            key=key, theirs=value, tuned=ours[key], reason=recipe.because.get(key)
        )
        for key, value in _flat(recipe.config, local_ranks).items()
        if value != ours[key] or key in recipe.because
    ]


def _flat(config: TrainConfig, local_ranks: int) -> dict[str, Any]:
    values: dict[str, Any] = {name: getattr(config, name) for name in _OF_SPEED}
    if config.device == "cpu":
        del values["tf32"]  # has no effect on CPUs
    values |= {f"data.{name}": getattr(config.data, name) for name in _OF_LOADING}
    gradient_sync = (
        sorted(ParallelSettings.model_fields.keys() - {"timeout_s"})
        if local_ranks > 1
        else []
    )
    return values | {
        f"parallel.{name}": getattr(config.parallel, name) for name in gradient_sync
    }


def is_precise(ratio: Interval) -> bool:
    """Return whether a speedup is precise enough to stop measuring."""
    low, high = ratio.low, ratio.high
    return (
        low is not None
        and high is not None
        and (high - low) / 2 <= PRECISE_SHARE * ratio.value
    )
