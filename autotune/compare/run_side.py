"""A training run as a side of a comparison, and the losses of two runs."""

import math
import statistics
from collections.abc import Sequence

from autotune.base.estimates import Estimate, Scale, estimate_single
from autotune.base.interval import Interval
from autotune.base.step_statistics import estimate_plausible_steps, paired_change
from autotune.compare import decide
from autotune.compare.decide import Circumstance, Measurement, Metric, Side
from autotune.profiles.decide.run_rates import settled_steps
from trainer.formats.canonical_json import canonical_sha256
from trainer.formats.nested_tables import flatten_table
from trainer.formats.run_record import Run, StepRow

_LOSS_SHARE = 0.5
"""Share of the steps that both runs took, the later part, in which their losses are
compared."""
_BY_STEPS = "the run's steps"


def run_side(run: Run, name: str) -> Side:
    """Return the figures of a run, without its warm-up."""
    header = run.header
    config = header.config
    steps = settled_steps(run)
    circumstances: dict[Circumstance, str] = {
        "model": hash_model(config.get("model"), header.name),
        "dataset": header.dataset_hash,
        "machine": header.device,
        "ranks": str(header.world_size),
        "global batch": f"{header.global_batch_size} sequences",
        "row length": str(config.get("seq_length_tokens")),
        "layout": header.layout,
    }
    rate = _training_rate(steps)
    notes = [
        f"{len(run.steps) - len(steps)} of {len(run.steps)} logged steps are warm-up"
        " and left out",
        "runs record their device, and not their host",
    ]
    if run.end is None:
        notes.append("the run has not finished, or was killed")
    return Side(
        kind="run",
        name=name,
        settings=flatten_table(config),
        circumstances=circumstances,
        facts={
            "device": header.device,
            "attention": header.attention,
            **header.versions,
        },
        measurements=(*rate, *_other_figures(steps)),
        headlines=tuple(rate),
        notes=tuple(notes),
    )


def _training_rate(steps: Sequence[StepRow]) -> list[Measurement]:
    tokens = [(step.tokens_per_s * step.step_s, step.step_s) for step in steps]
    return _figure_of_steps(decide.TRAINING_RATE, tokens)


def _other_figures(steps: Sequence[StepRow]) -> list[Measurement]:
    """Return the waits of steps, their MFU, and the peak memory."""
    data_waits = [(step.data_wait_s, step.step_s) for step in steps]
    rank_waits = [
        (step.communication_s, step.step_s)
        for step in steps
        if step.communication_s is not None
    ]
    mfu = [
        (step.mfu * step.step_s, step.step_s) for step in steps if step.mfu is not None
    ]
    figures = [
        *_figure_of_steps(decide.DATA_WAIT, data_waits, scale="linear"),
        *_figure_of_steps(decide.WAIT_FOR_RANKS, rank_waits, scale="linear"),
        *_figure_of_steps(decide.MFU, mfu),
    ]
    if steps and steps[-1].peak_memory_bytes > 0:
        peak = estimate_single(steps[-1].peak_memory_bytes)
        figures.append(
            Measurement(metric=decide.PEAK_MEMORY, of=_BY_STEPS, estimate=peak)
        )
    return figures


def _figure_of_steps(
    metric: Metric, pairs: Sequence[tuple[float, float]], *, scale: Scale = "log"
) -> list[Measurement]:
    """Return a figure of steps.

    Args:
        metric: The figure.
        pairs: Amount and seconds of each step.
        scale: Scale of comparison.

    Returns:
        One measurement, or an empty list if fewer than two steps have sound figures.
    """
    estimate = estimate_plausible_steps(pairs, scale=scale)
    if estimate is None or estimate.n < 2:
        return []
    return [Measurement(metric=metric, of=_BY_STEPS, estimate=estimate)]


def hash_model(config: object, name: object = "") -> str:
    """Return the hash of a model's config without its name.

    If there is no config, the name is hashed.
    """
    if not isinstance(config, dict):
        return canonical_sha256(name)
    unnamed = {key: value for key, value in config.items() if key != "name"}
    return canonical_sha256(unnamed)


def compare_losses(a: Run, b: Run) -> tuple[Measurement, Measurement, Interval] | None:
    """Return both losses over the later part of the common steps, and their ratio.

    Returns:
        The losses of A and B and the ratio, or None if no steps are common.
    """
    losses_a = _loss_by_step(a)
    losses_b = _loss_by_step(b)
    common_steps = sorted(losses_a.keys() & losses_b.keys())
    if not common_steps:
        return None
    later_steps = common_steps[-math.ceil(_LOSS_SHARE * len(common_steps)) :]
    later_a = [losses_a[step] for step in later_steps]
    later_b = [losses_b[step] for step in later_steps]
    of = f"at the same steps, {later_steps[0]} to {later_steps[-1]}"
    return (
        _mean_loss(later_a, of),
        _mean_loss(later_b, of),
        paired_change(later_a, later_b),
    )


def _loss_by_step(run: Run) -> dict[int, float]:
    """Return the losses that are positive and finite."""
    return {
        step.step: step.loss
        for step in run.steps
        if step.loss is not None and math.isfinite(step.loss) and step.loss > 0
    }


def _mean_loss(losses: Sequence[float], of: str) -> Measurement:
    estimate = Estimate(
        value=statistics.fmean(losses),
        n=len(losses),
        reason_without_variance="too few steps",
    )
    return Measurement(metric=decide.LOSS, of=of, estimate=estimate)
