"""Rejection of rates that no GPU can reach, and of every rate of a pretended one.

Pure.
"""

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from autotune.base.model_work import expected_model_work
from autotune.errors import MachineLacks, Undecided
from autotune.machine.values import is_pretended
from autotune.profiles.values import Profile, fill_share
from autotune.trials.values import Measured, Trial
from trainer.config.train_config import TrainConfig
from trainer.model.flops import Format, find_peak, product_format
from trainer.record.run_record import Run, settings_of

SLACK = 1.05
"""Tolerance over the data sheet, as a GPU may be delivered with a little more; in
practice none reaches the sheet."""
RATE_JOBS = frozenset({"training", "links", "gradient_sync", "own_loader"})
"""Jobs that always measure a rate; a ``step`` may measure memory alone."""
_MULTIPLY_AND_ADD, _FORWARD_AND_BACKWARD = 2, 3
_LEAST_S = 1e-12
"""Least time of a measurement, in seconds, so that none is divided by zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRate:
    """A measured rate of one GPU."""

    what: str
    per_s: float
    """FLOP/s, or bytes/s of its links."""
    of: Format | Literal["links"] = "bf16"


def check_rates(gpu_name: str | None, rates: Iterable[GpuRate]) -> None:
    """Raise ``Undecided`` if the named GPU cannot reach a rate.

    A CPU, or an unknown GPU, has no limit.
    """
    if gpu_name is None or (peak := find_peak(gpu_name)) is None:
        return
    for rate in rates:
        # Both directions together: a reducing switch (NVLink SHARP) halves the bytes
        # that a GPU sends.
        limit = peak.link_bytes_per_s if rate.of == "links" else getattr(peak, rate.of)
        unit = "TB/s of links" if rate.of == "links" else f"TFLOP/s in {rate.of}"
        if limit is not None and rate.per_s > SLACK * limit:
            raise Undecided(
                f"{rate.what}: {rate.per_s / 1e12:,.4g} {unit} measured on {gpu_name}"
                f" exceeds its peak of {limit / 1e12:,.4g}: the measurement is wrong"
                " and is discarded",
                next_step=(
                    "Check the driver and the clocks (nvidia-smi -q -d CLOCK), then"
                    " measure again."
                ),
            )


def is_possible(gpu_name: str | None, rates: Iterable[GpuRate]) -> bool:
    """Return whether the named GPU can reach all of these rates, as far as its limits are known."""
    try:
        check_rates(gpu_name, rates)
    except Undecided:
        return False
    return True


def check_real(gpu_name: str | None, driver: str | None, what: str) -> None:
    """Raise ``MachineLacks`` if a rate is to be of a pretended GPU, whose kernels do nothing."""
    if is_pretended(driver):
        told = (
            f"{what} cannot be measured on a pretended {gpu_name} (driver {driver}):"
            " its kernels do nothing"
        )
        next_step = (
            "Measure on a real GPU. On this one only memory can be measured: autotune"
            " probe"
        )
        raise MachineLacks(told, next_step=next_step)


def has_rate(
    trial: Trial, outcome: Measured, *, gpu_name: str | None, driver: str | None
) -> bool:
    """Return whether a trial's rate may be shown: it was timed, on a real GPU that can reach it."""
    return (
        trial.is_timed
        and not is_pretended(driver)
        and is_possible(gpu_name, rates_of_trial(trial, outcome))
    )


def rates_of_trial(trial: Trial, outcome: Measured) -> Iterator[GpuRate]:
    """Yield the rates of a trial, each of one GPU."""
    figures, what = outcome.figures, f"the trial {trial.job!r}"
    if trial.job in ("step", "training", "gradient_sync") and not trial.measured.get(
        "replayed_step_s"
    ):
        yield GpuRate(
            what=what,
            per_s=_training_flops_per_s(trial, figures),
            of=_format(trial.config),
        )
    if trial.job == "links":
        yield from (
            GpuRate(what=what, per_s=one) for one in figures["matmul_flops_per_s"]
        )
        times = [
            pair
            for name in ("all", "within", "between")
            for pair in figures.get(name, ())
        ]
        moved = [size / max(seconds, _LEAST_S) for size, seconds in times]
        moved += figures.get("neighbours_bytes_per_s", ())
        yield from (GpuRate(what=what, per_s=one, of="links") for one in moved)


def _training_flops_per_s(trial: Trial, figures: dict[str, Any]) -> float:
    """Return the FLOP/s of one GPU: as counted, and at least those that its tokens require."""
    least = least_flops_per_token(settings_of(trial.config), None)
    if trial.job == "training":
        flops_per_s = max(
            figures.get("model_flops_per_s") or 0.0,
            least * figures.get("tokens_per_s", 0.0),
        )
        return float(flops_per_s / (figures.get("local_ranks") or 1))
    if not figures["step_s"]:
        return 0.0
    seconds = max(statistics.median(figures["step_s"]), _LEAST_S)
    if trial.job == "gradient_sync":
        rows_of_rank = (
            figures["micro_batch_size"] * figures["gradient_accumulation_steps"]
        )
        ranks = max(1.0, trial.config.get("global_batch_size", 0) / rows_of_rank)
        return float(least * figures["tokens_per_step"] / seconds / ranks)
    flops = max(
        figures.get("model_flops_per_step") or 0.0,
        least * figures.get("padded_tokens_per_step", 0),
    )
    return float(flops / seconds / (figures.get("local_ranks") or 1))


def check_profile(profile: Profile) -> None:
    """Raise ``Undecided`` for a rate that its GPU cannot reach, ``MachineLacks`` for any rate of a pretended GPU."""
    here, evidence, probe = (
        profile.fingerprint,
        profile.evidence,
        profile.evidence.probe,
    )
    kept = [evidence.workers, evidence.network, evidence.baseline, evidence.explore]
    if any(one is not None for one in kept) or (
        probe is not None and (probe.curve or probe.sustained)
    ):
        check_real(here.gpu_name, here.driver, "a profile's tokens/s")
    check_rates(here.gpu_name, _rates_of_profile(profile))


def _rates_of_profile(profile: Profile) -> Iterator[GpuRate]:
    network, of = (
        profile.evidence.network,
        product_format(profile.train.precision, tf32=profile.train.tf32),
    )
    least = least_flops_per_token(profile.train, profile.parameters)
    for what, tokens_per_s, ranks, number_format in _tokens_per_s(profile, of):
        yield GpuRate(what=what, per_s=least * tokens_per_s / ranks, of=number_format)
    for row in (
        profile.evidence.workers.rows if profile.evidence.workers is not None else ()
    ):
        for per_s in row.model_flops_per_s_per_rank:
            yield GpuRate(
                what=f"{row.num_workers} DataLoader workers", per_s=per_s, of=of
            )
    if network is not None:
        yield from (
            GpuRate(what="matmuls", per_s=per_s) for per_s in network.matmul_flops_per_s
        )
        yield from (
            GpuRate(what=f"links {link.scope}", per_s=link.bytes_per_s, of="links")
            for link in network.links
        )


def _tokens_per_s(
    profile: Profile, of: Format
) -> Iterator[tuple[str, float, int, Format]]:
    """Yield every rate in tokens: its name, tokens per second, number of ranks, and number format."""
    probe, workers, network = (
        profile.evidence.probe,
        profile.evidence.workers,
        profile.evidence.network,
    )
    baseline, explore = profile.evidence.baseline, profile.evidence.explore
    if probe is not None:
        for point in [*probe.curve, *([probe.sustained] if probe.sustained else [])]:
            yield (
                f"micro-batch size {point.micro_batch_size}",
                point.padded_tokens_per_s,
                probe.local_ranks,
                of,
            )
    # A replayed one computes nothing.
    if workers is not None and workers.replayed_step_s is None:
        fill = fill_share(profile) or 0.0
        counts = [
            (f"{row.num_workers} DataLoader workers", row.padded_tokens_per_s)
            for row in workers.rows
        ]
        for what, rates in [
            *counts,
            ("cached batches", workers.cached_padded_tokens_per_s),
        ]:
            yield from ((what, fill * rate, workers.local_ranks, of) for rate in rates)
    if baseline is not None:
        for recipe in baseline.rows:
            # Others may have another precision.
            of_recipe: Format = of if recipe.name == "tuned" else "bf16"
            yield from (
                (recipe.name, rate, baseline.local_ranks, of_recipe)
                for rate in recipe.tokens_per_s
            )
    if explore is not None:
        for tried in explore.rows:
            tried_in = product_format(tried.settings.precision, tf32=profile.train.tf32)
            yield (
                tried.settings.name,
                tried.tokens_per_s or 0.0,
                profile.local_ranks,
                tried_in,
            )
    if network is not None:
        for one in network.gradient_syncs:
            yield (
                one.strategy,
                one.tokens_per_s or 0.0,
                network.nodes * network.ranks_per_node,
                of,
            )
        for row in network.scaling:
            yield (
                f"{row.nodes} nodes",
                row.tokens_per_s,
                row.nodes * network.ranks_per_node,
                of,
            )


def check_run(run: Run) -> None:
    """Raise ``Undecided`` for a rate that its GPU cannot reach, ``MachineLacks`` if that is a pretended one."""
    header, what = run.header, f"the run {run.directory.name}"
    check_real(header.device, header.driver, f"{what}: its tokens/s")
    least, of = (
        least_flops_per_token(settings_of(header.config), header.parameters),
        _format(header.config),
    )
    peak = header.peak_flops_per_s or 0.0
    each = [
        (
            row.model_flops_per_s_per_rank,
            row.tokens_per_s / header.world_size,
            row.mfu or 0.0,
        )
        for row in run.steps
    ]
    flops_per_s = (
        max(told, least * tokens_per_s, mfu * peak) for told, tokens_per_s, mfu in each
    )
    check_rates(
        header.device, [GpuRate(what=what, per_s=max(flops_per_s, default=0.0), of=of)]
    )


def least_flops_per_token(train: TrainConfig | None, parameters: int | None) -> float:
    """Return the FLOPs that training takes for each token at least.

    For a known architecture, those of the matmuls with its layers' weights; attention,
    head and embeddings come on top. For any other, twice its parameters, a third of the
    usual count, as an embedding table takes part in no matmul.
    """
    work = None if train is None else expected_model_work(train, 1, parameters or 1)
    if work is not None:
        return float(_FORWARD_AND_BACKWARD * _MULTIPLY_AND_ADD * work.weights_per_token)
    return float(_MULTIPLY_AND_ADD * (parameters or 0))


def _format(config: dict[str, Any]) -> Format:
    return product_format(
        config.get("precision", "fp32"), tf32=config.get("tf32", True)
    )
