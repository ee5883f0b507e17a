"""What the tuned settings are held against: the trainer's defaults, and the paper's own set-up as far as it goes. Pure.

Only settings that bear on speed are replaced. Model, dataset, length of rows, device and the global batch in real
tokens stay what the user asked for. The paper-style recipe is what the paper's public trainer does (undertale-re at
commit 1dae6f2) in terms of this one. It cannot be made as slow as that one: positions that are embedded in a loop over
samples, attention head by head, an optimizer that is not fused and two synchronised log calls a step are left out. So
what is won against it is a lower bound of what would be won against the original.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.core.evidence import RecipeName
from autotune.core.interval import SHOWN_CONFIDENCE, Interval
from autotune.decide.statistics import ratio_of
from trainer.config import DataSettings, ParallelSettings, Tag, TrainConfig, tagged

PAPER_WORKERS = 8
"""Loader workers of a rank in the paper's trainer, whatever the machine."""
PRECISE_SHARE = 0.05
"""Ratios are known well enough when their 95 % bounds lie so far to both sides."""

_OF_SPEED = tagged(TrainConfig, Tag.SPEED)
_OF_LOADING = tagged(DataSettings, Tag.LOADER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One way to train."""

    name: RecipeName
    config: TrainConfig
    because: Mapping[str, str]
    """Why settings are what they are, by key, where that is not the recipe's own choice."""

    def with_rows(self, rows: int, because: str) -> "Recipe":
        """The same with another micro-batch."""
        return Recipe(
            name=self.name,
            config=self.config.model_copy(update={"micro_batch_rows": rows}),
            because=dict(self.because) | {"micro_batch_rows": because},
        )


def default_recipe(tuned: TrainConfig, global_batch_tokens: int) -> Recipe:
    """What somebody trains with who names model and data, and leaves the rest as it is.

    Args:
        tuned: The profile's settings.
        global_batch_tokens: Their global batch in real tokens, which stays the same.
    """
    return Recipe(name="default", config=_as_by_default(tuned, global_batch_tokens), because={})


def paper_style(tuned: TrainConfig, global_batch_tokens: int, most_workers: int, limit: str) -> Recipe:
    """As the paper's trainer sets things up: fp32 without TF32, padded rows, a head over all places, plain DDP.

    Its micro-batch begins with the tuned rows; whether they fit is for trials to say. Attention is SDPA over whole
    rows, which ``auto`` is with fp32.

    Args:
        tuned: The profile's settings.
        global_batch_tokens: Their global batch in real tokens, which stays the same.
        most_workers: Loader workers that a rank may have here.
        limit: What limits them.
    """
    plain = _as_by_default(tuned, global_batch_tokens)
    workers = min(PAPER_WORKERS, most_workers)
    changes = {
        "micro_batch_rows": tuned.micro_batch_rows,
        "head": "dense",
        "last_layer": "all",
        "precision": "fp32",
        "tf32": False,
        "data": plain.data.model_copy(update={"loader_workers": workers}),
        # As torch has it where nobody says otherwise.
        "parallel": plain.parallel.model_copy(update={"gradient_as_bucket_view": False}),
    }
    because = {"data.loader_workers": f"the paper's {PAPER_WORKERS} are too many here: {limit}"}
    return Recipe(
        name="paper-style",
        config=plain.model_copy(update=changes),
        because=because if workers < PAPER_WORKERS else {},
    )


def _as_by_default(tuned: TrainConfig, global_batch_tokens: int) -> TrainConfig:
    loading = {name: DataSettings.model_fields[name].default for name in _OF_LOADING}
    speed = {name: TrainConfig.model_fields[name].default for name in _OF_SPEED}
    rest = {
        "data": tuned.data.model_copy(update=loading),
        "parallel": ParallelSettings(timeout_s=tuned.parallel.timeout_s),
        "global_batch_tokens": global_batch_tokens,
        "global_batch_samples": None,
    }
    return tuned.model_copy(update=speed | rest)


def differences(recipe: Recipe, tuned: TrainConfig, local_ranks: int) -> list[str]:
    """How a recipe differs from the tuned settings in what bears on speed, as ``key: theirs instead of tuned``.

    Args:
        recipe: Of the same model, data and device.
        tuned: The profile's settings.
        local_ranks: That train together: one alone exchanges nothing.
    """
    theirs, ours = _flat(recipe.config, local_ranks), _flat(tuned, local_ranks)
    found = []
    for key, value in theirs.items():
        reason = recipe.because.get(key)
        told = f"{key}: {_said(value)}" + ("" if value == ours[key] else f" instead of {_said(ours[key])}")
        if value != ours[key] or reason is not None:
            found.append(told + ("" if reason is None else f" ({reason})"))
    return found


def _flat(config: TrainConfig, local_ranks: int) -> dict[str, Any]:
    values: dict[str, Any] = {name: getattr(config, name) for name in _OF_SPEED}
    if config.device == "cpu":
        del values["tf32"]  # means nothing there
    values |= {f"data.{name}": getattr(config.data, name) for name in _OF_LOADING}
    exchange = sorted(ParallelSettings.model_fields.keys() - {"timeout_s"}) if local_ranks > 1 else []
    return values | {f"parallel.{name}": getattr(config.parallel, name) for name in exchange}


def _said(value: object) -> str:
    if value is None:
        return "unset"
    return str(value).lower() if isinstance(value, bool) else str(value)


def ratio_to_tuned(theirs: Sequence[float], tuned: Sequence[float]) -> Interval:
    """Where the ratios of windows of the same rounds lie, with 95 % bounds; of fewer than ``LEAST_WINDOWS`` without.

    From five rounds on, a held-up window does not count.

    Args:
        theirs: Tokens per second, one figure per round.
        tuned: The same of the tuned settings, in the same rounds.

    Raises:
        ValueError: If there are none, or not as many of both.
    """
    return ratio_of(list(zip(theirs, tuned, strict=True)), confidence=SHOWN_CONFIDENCE)


def is_precise(ratio: Interval) -> bool:
    """Whether a ratio is known well enough to stop."""
    if ratio.low is None or ratio.high is None:
        return False
    return (ratio.high - ratio.low) / 2 <= PRECISE_SHARE * ratio.value
