"""Scenarios of what is wrong with a machine or a profile."""

from dataclasses import replace

from autotune.core.evidence import EstimateEvidence, Evidence
from autotune.core.outcome import Contaminated
from autotune.core.trial import FinishedTrial, Trial
from autotune.decide.advice import Situation
from benchmarks.scenarios.situations import Scenario, ran, step_trial, tuned
from benchmarks.simulated_training import World, settings
from trainer.config import TrainConfig


def of_condition(gpu: World) -> tuple[Scenario, ...]:
    """Heat, neighbours, edits, and what was left out."""
    good = settings(gpu)
    hot = _void("GPU 0 was slowed down: hw_thermal in 4 of 9 samples, at up to 91 °C")
    shared = _void("another process computed on GPU 0: 2 were on it in 3 of 9 samples")
    fine = step_trial(gpu, good, 8)
    lazy = replace(gpu, reached={"bf16": 0.1, "tf32": 0.12, "fp32": 0.5})
    return (
        Scenario(
            rule="thermal", what="a GPU that is too hot", speaks=lambda: replace(tuned(gpu, good), trials=(hot, fine)),
            silent=lambda: replace(tuned(gpu, good), trials=(shared, fine)),
        ),
        Scenario(
            rule="company", what="a neighbour on the gpu",
            speaks=lambda: replace(tuned(gpu, good), trials=(shared, fine)),
            silent=lambda: replace(tuned(gpu, good), trials=(hot, fine)),
        ),
        Scenario(
            rule="utilisation", what="98 % utilisation at a tenth of the peak",
            speaks=lambda: ran(lazy, good, with_profile=True), silent=lambda: ran(gpu, good),
        ),
        Scenario(
            rule="edited", what="a profile that was edited", speaks=lambda: replace(tuned(gpu, good), intact=False),
            silent=lambda: tuned(gpu, good),
        ),
        Scenario(
            rule="only-estimated", what="a profile of a machine that is not here",
            speaks=lambda: _estimated(gpu, good), silent=lambda: tuned(gpu, good),
        ),
        Scenario(
            rule="not-measured", what="no sweep of workers",
            speaks=lambda: replace(tuned(gpu, good), missing=(("loader workers", "autotune workers"),)),
            silent=lambda: tuned(gpu, good),
        ),
    )  # fmt: skip


def _estimated(gpu: World, train: TrainConfig) -> Situation:
    now = tuned(gpu, train)
    assert now.profile is not None
    terms = {"activations: Linear": 6 * 10**10, "parameters": 10**9}
    estimate = EstimateEvidence(
        rows_least=410, rows_usual=430, rows_most=440, predicted_peak_bytes=sum(terms.values()), terms_bytes=terms,
        parameters=gpu.parameters, attention="sdpa", attention_reason="as asked for", vocab_size=30_522,
        documents_per_row=4.0, mean_real_tokens_per_row=510.0, rows_assumed=True, traced_with="torch 2", choice="",
    )  # fmt: skip
    profile = now.profile.model_copy(update={"evidence": Evidence(estimate=estimate)})
    return replace(now, profile=profile, bottleneck=None)


def _void(detail: str) -> FinishedTrial:
    return FinishedTrial(
        trial=Trial(job="step", measured={}, timeout_s=0.0), outcome=Contaminated(detail=detail), seconds=10.0,
        label="", from_ledger=True,
    )  # fmt: skip
