"""What is known in a simulated training, put together for rules to look at."""

from collections.abc import Callable
from dataclasses import dataclass

from autotune.core.advice import Advice
from autotune.core.outcome import Measured
from autotune.core.profile import Profile
from autotune.core.trial import FinishedTrial, Trial
from autotune.decide.advice import DataFacts, Situation
from autotune.decide.advice.apply import with_changes
from autotune.decide.bottleneck import bottleneck_of_profile, bottleneck_of_run
from autotune.decide.counters import counters_of_profile
from benchmarks.simulated_records import profile_of, run_of
from benchmarks.simulated_training import World, memory_bytes, settings_with, step
from trainer.config import TrainConfig

DATA = DataFacts(path="DATA", prepared=True, vocab_size=16_384, token_bytes=2 * 10**9, filesystem="ext4")
Benefit = Callable[[Advice], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A rule, where it speaks, what following it delivers, and where it is silent."""

    rule: str
    what: str
    speaks: Callable[[], Situation]
    silent: Callable[[], Situation]
    delivered: Benefit | None = None
    """The ratio of what the gain is of; None where the rule promises none."""


def tuned(world: World, train: TrainConfig, **changes: object) -> Situation:
    """After tuning with good settings; the profile then says something else."""
    profile = profile_of(world, train)
    profile = profile.model_copy(update={"train": settings_with(train, **changes)})
    return Situation(train=profile.train, profile=profile, bottleneck=bottleneck_of_profile(profile), data=DATA)


def ran(world: World, train: TrainConfig, *, with_profile: bool = False, noise_scale: float | None = None) -> Situation:
    """After a run."""
    run = run_of(world, train, noise_scale=noise_scale, first_step=1 if noise_scale is None else 5000)
    profile = profile_of(world, train) if with_profile else None
    counters = None if profile is None else counters_of_profile(profile)
    return Situation(train=train, profile=profile, run=run, bottleneck=bottleneck_of_run(run, counters), data=DATA)


def rates(world: World, train: TrainConfig) -> Benefit:
    """True tokens/s with the advice followed, to those without."""

    def delivered(advice: Advice) -> float:
        after = step(world, with_changes(train, advice.changes))
        return after.real_tokens_per_s / step(world, train).real_tokens_per_s

    return delivered


def with_evidence(profile: Profile, **evidence: object) -> Profile:
    """The profile with other evidence."""
    return profile.model_copy(update={"evidence": profile.evidence.model_copy(update=evidence)})


def step_trial(gpu: World, train: TrainConfig, rows: int) -> FinishedTrial:
    """A trial of such a micro-batch that ran, with its peak."""
    return FinishedTrial(
        trial=Trial(job="step", measured={"config": {"micro_batch_rows": rows}}, timeout_s=0.0),
        outcome=Measured(figures={"peak_bytes": int(memory_bytes(gpu, train, rows))}), seconds=10.0, label="",
        from_ledger=True,
    )  # fmt: skip
