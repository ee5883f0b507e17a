"""Reject rates that no GPU can reach, and every rate of a pretended one. Pure.

A rate beyond a data sheet means that a clock, a kernel or a driver is not what it says. Each rate is checked where it
would be kept: with its trial, in a profile, in the GPU check.
"""

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from autotune.core.hardware import is_pretended
from autotune.core.outcome import Measured
from autotune.core.profile import Profile
from autotune.core.trial import Trial
from autotune.decide.shape import vocab_size_of, work_of_shape
from autotune.errors import MachineLacks, Undecided
from trainer.config import TrainConfig
from trainer.peaks import Format, peak_bytes_per_s, peak_flops_per_s, product_format

SLACK = 1.05
"""A GPU may be delivered with a little more than its data sheet says; nothing reaches the sheet in practice."""
RATE_JOBS = frozenset({"feed", "matmul", "links", "exchange"})
"""Jobs whose answer is a rate; a ``step`` answers for memory as well."""
_MULTIPLY_AND_ADD, _FORWARD_AND_BACKWARD = 2, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A rate of one GPU."""

    what: str
    per_s: float
    """FLOP/s, or bytes/s of its own memory."""
    of: Format | Literal["memory"] = "bf16"


def check_rates(gpu_name: str | None, rates: Iterable[Rate]) -> None:
    """Reject what the named GPU cannot do; nothing is known of a CPU, or of a GPU that is not in the table.

    Raises:
        Undecided: With the GPU, the rate and the limit.
    """
    for rate in rates:
        limit = None
        if gpu_name is not None:
            limit = peak_bytes_per_s(gpu_name) if rate.of == "memory" else peak_flops_per_s(gpu_name, rate.of)
        if limit is not None and rate.per_s > SLACK * limit:
            unit = "TB/s of memory" if rate.of == "memory" else f"TFLOP/s in {rate.of}"
            raise Undecided(
                f"{rate.what}: {rate.per_s / 1e12:,.4g} {unit} measured on {gpu_name}, which reaches "
                f"{limit / 1e12:,.4g} at most: the measurement is wrong, and is not kept",
                next_step="Check driver and clock of the machine, then measure again.",
            )


def check_real(gpu_name: str | None, driver: str | None, what: str) -> None:
    """Reject a rate of a pretended GPU, whose kernels do nothing.

    Raises:
        MachineLacks: With the GPU and its driver.
    """
    if is_pretended(driver):
        raise MachineLacks(
            f"{what} cannot be measured on a pretended {gpu_name} (driver {driver}): its kernels do nothing",
            next_step="Measure on a real GPU. Only sizes in bytes can be had here: autotune probe",
        )


def rates_of_trial(trial: Trial, outcome: Measured) -> Iterator[Rate]:
    """What the GPUs of a trial did, each of them."""
    figures, what = outcome.figures, f"the trial {trial.job!r}"
    ranks = figures.get("local_ranks") or 1
    if trial.job == "step" and figures.get("model_flops_per_step") and figures["step_s"]:
        seconds = max(statistics.median(figures["step_s"]), 1e-12)
        yield Rate(
            what=what, per_s=figures["model_flops_per_step"] / seconds / ranks, of=_format(trial.measured["config"])
        )
    if trial.job == "feed" and figures.get("model_flops_per_s"):
        yield Rate(what=what, per_s=figures["model_flops_per_s"] / ranks, of=_format(trial.measured["config"]))
    if trial.job == "links":
        yield from (Rate(what=what, per_s=one) for one in figures["products_flops_per_s"])
    if trial.job == "matmul" and trial.measured.get("device") == "cuda":
        if figures["flops_per_s"]:
            of: Format = "bf16" if trial.measured["dtype"] == "bfloat16" else "tf32"
            yield Rate(what="matrix products", per_s=figures["flops_per_s"], of=of)
        if figures["copy_bytes_per_s"]:
            yield Rate(what="copies", per_s=figures["copy_bytes_per_s"], of="memory")


def check_profile(profile: Profile) -> None:
    """Reject a profile that keeps a rate which its GPU cannot reach.

    Raises:
        Undecided: If it does.
        MachineLacks: If its GPU is a pretended one, and it keeps any rate.
    """
    here, evidence = profile.fingerprint, profile.evidence
    kept = [evidence.workers, evidence.network, evidence.baseline, evidence.explore]
    if any(one is not None for one in kept) or (evidence.probe is not None and evidence.probe.curve):
        check_real(here.gpu_name, here.driver, "a profile's tokens/s")
    check_rates(here.gpu_name, _rates_of_profile(profile))


def _rates_of_profile(profile: Profile) -> Iterator[Rate]:
    evidence, of = profile.evidence, product_format(profile.train.precision, tf32=profile.train.tf32)
    probe, workers, network = evidence.probe, evidence.workers, evidence.network
    if probe is not None and probe.parameters is not None:
        flops = _least_flops_per_token(profile.train, probe.parameters)
        for point in [*probe.curve, *([probe.sustained] if probe.sustained else [])]:
            per_s = flops * point.slot_tokens_per_s / probe.local_ranks
            yield Rate(what=f"{point.rows} rows", per_s=per_s, of=of)
    if workers is not None:
        for row in workers.rows:
            for per_s in row.model_flops_per_s_per_rank:
                yield Rate(what=f"{row.loader_workers} DataLoader workers", per_s=per_s, of=of)
    if network is not None:
        yield from (Rate(what="matrix products", per_s=per_s) for per_s in network.products_flops_per_s)


def _least_flops_per_token(train: TrainConfig, parameters: int) -> float:
    """Training's products with the layers' weights; attention and head come on top. 0 for an unknown architecture."""
    vocab_size = vocab_size_of(train, parameters)
    work = None if vocab_size is None else work_of_shape(train, vocab_size, parameters)
    return 0.0 if work is None else float(_FORWARD_AND_BACKWARD * _MULTIPLY_AND_ADD * work.weights_per_token)


def _format(config: dict[str, Any]) -> Format:
    return product_format(config.get("precision", "fp32"), tf32=config.get("tf32", True))
