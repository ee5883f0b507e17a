"""Throughput of a run, in non-padding tokens/s, from its logged steps. Pure."""

import math

from autotune.base.step_statistics import estimate_plausible_steps
from autotune.profiles.decide.rates import Rate
from trainer.formats.run_record import Run, StepRow

WARM_UP_SHARE = 0.1
"""Warm-up as a share of a run's logged steps, in which caches, clocks and allocators
settle."""
MOST_WARM_UP_STEPS = 20
"""Most logged steps of a run that count as warm-up: a tenth of a long run would discard
steps that have settled."""


def settled_steps(run: Run) -> tuple[StepRow, ...]:
    """Return the logged steps of a run since its last start, without warm-up.

    Steps before a resume may have had other settings. The first step is always part of
    the warm-up, so a run with one step has no settled steps.
    """
    steps = tuple(step for step in run.steps if step.step > run.header.resumed_step)
    warm_up = max(1, math.ceil(WARM_UP_SHARE * len(steps)))
    return steps[min(MOST_WARM_UP_STEPS, warm_up) :]


def run_rate(run: Run) -> Rate | None:
    """Return the rate of a run's settled steps, or of all steps if none is settled.

    Returns:
        None if the run logged no plausible step.
    """
    steps = settled_steps(run) or run.steps
    estimate = estimate_plausible_steps(
        [(step.tokens_per_s * step.step_s, step.step_s) for step in steps]
    )
    if estimate is None:
        return None
    return Rate(
        estimate=estimate,
        interval=estimate.interval(),
        ranks=run.header.world_size,
        read_from="run",
        source=f"{len(steps)} logged steps",
    )
