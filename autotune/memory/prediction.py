"""Memory predictions for ``autotune estimate`` and ``autotune plan``.

They give the largest micro-batch of a model, alternative settings, and the memory when
several GPUs share the model.
"""

import contextlib
import importlib.metadata
import itertools
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from autotune.base.defaults import HEADROOM_SHARE, MAX_MICRO_BATCH_SIZE
from autotune.base.model_work import largest_gather_bytes
from autotune.base.units import format_bytes
from autotune.corpus.values import SequenceContents
from autotune.errors import AutotuneError, BadInput, ExceedsMemory, UsageError
from autotune.machine.gpu_models import (
    GPU_MODELS,
    RESERVE_BYTES,
    GpuModel,
    find_gpu_model,
    gpu_model_of,
)
from autotune.machine.host import SystemHost
from autotune.machine.nvml import NvmlMonitor
from autotune.machine.values import visible_devices
from autotune.memory.decide.memory_model import memory_breakdown, size_range
from autotune.memory.decide.overheads import (
    OverheadsRange,
    overheads_on_cpu,
    overheads_on_gpu,
    unconfirmed_share,
)
from autotune.memory.decide.sharding import (
    shares,
    smallest_sharding,
    state_of_terms,
    zero_share,
)
from autotune.memory.estimate import (
    CannotTrace,
    MemoryEstimate,
    estimate_model,
    sequence_contents,
    traced_work,
)
from autotune.memory.values import (
    Answer,
    MemoryBreakdown,
    MemoryPlan,
    PredictedModel,
    Share,
    StateBytes,
    TraceRequest,
)
from autotune.plan.values import Basis, Fleet, PlanFigure
from autotune.profiles.decide.default_settings import default_layout, default_precision
from autotune.profiles.decide.micro_batch import with_headroom
from autotune.profiles.values import Profile
from autotune.speed.decide import predict_speed
from autotune.speed.measure import known_rates
from autotune.speed.values import MachineRates
from autotune.trials.fork_server import ForkServerMachine, Machine
from trainer.config.train_config import ModelSettings, Strategy, TrainConfig
from trainer.model.families import FAMILIES
from trainer.record.progress import Update

_SINGLE_CHANGES = (
    ("precision", "bf16"),
    ("activation_checkpointing", "full"),
    ("mlm_head", "sparse"),
)
"""Settings that each save memory, tried one by one if a model does not fit."""
_ALTERNATIVES = ("precision", "attention", "activation_checkpointing", "mlm_head")
"""Settings that ``--what-if`` combines."""
_STRATEGIES: dict[str, Strategy] = {"ZeRO-1": "zero1", "ZeRO-3 (FSDP2)": "fsdp2"}
"""The trainer's strategies that share a model's state, by the name of the share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionRequest:
    """Request for a memory prediction."""

    configs: tuple[TrainConfig, ...]
    """Settings of the step of each model, all on the same device; batch sizes are
    ignored."""
    gpu: str | None
    memory_bytes: int | None
    data: Path | None
    vocab_size: int
    """Vocabulary size without a dataset."""
    ranks: int
    accumulate: bool
    tensor_ranks: int
    pipeline_stages: int
    max_micro_batch_size: int


def settings_of_step(
    model: ModelSettings,
    device: Literal["cuda", "cpu"],
    *,
    layout: str | None,
    precision: str | None,
    **others: object,
) -> TrainConfig:
    """Return the trainer's settings, ``others`` included.

    None takes the default of the model or the device.
    """
    return TrainConfig.model_validate(
        {
            "model": model,
            "device": device,
            "layout": layout or default_layout(model),
            "precision": precision or default_precision(device),
            **others,
        }
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The GPU, or the amount of memory, to predict for."""

    name: str
    budget_bytes: int
    overheads: OverheadsRange
    reserve_bytes: int = 0
    """GPU memory that is left out of the budget."""


def predict(
    request: PredictionRequest, target: Target, *, what_if: bool, update: Update
) -> tuple[Answer, Mapping[str, AutotuneError]]:
    """Predict every model.

    A model that does not fit, or can only be measured, does not affect the others.

    Returns:
        The answer, and the error of each model without a prediction, by name.
    """
    predicted: list[PredictedModel] = []
    rejected: dict[str, AutotuneError] = {}
    with ForkServerMachine() as machine:
        update(0, None, "loading torch")
        machine.start()
        predictor = _Predictor(request=request, target=target, machine=machine)
        for number, config in enumerate(request.configs):
            update(number, len(request.configs), f"tracing {config.model.name}")
            try:
                predicted.append(predictor.predict(config))
            except (CannotTrace, ExceedsMemory) as error:
                rejected[config.model.name] = error
        alternatives = tuple(predictor.what_ifs(update)) if what_if else ()
    answer = Answer(
        target=target.name,
        reserve_bytes=target.reserve_bytes,
        models=tuple(predicted),
        what_if=alternatives,
        rejected={
            name: {
                "exit_code": error.exit_code,
                "message": error.message,
                "next_step": error.next_step,
            }
            for name, error in rejected.items()
        },
    )
    return answer, rejected


def find_target(request: PredictionRequest) -> Target:
    """Return the GPU to predict for, with its memory budget.

    Raises:
        BadInput: If the GPU is not found, or has less memory than the budget.
        UsageError: If the memory is unknown, or of a CPU.
    """
    budget = request.memory_bytes
    if request.configs[0].device == "cpu":
        if budget is None or request.gpu is not None:
            raise UsageError(
                "--device cpu requires --memory, without --gpu",
                next_step="Try --device cpu --memory 2GiB.",
            )
        return Target(
            name=f"a CPU with {format_bytes(budget)}",
            budget_bytes=budget,
            overheads=overheads_on_cpu(),
        )
    gpu_model: GpuModel | None = None
    if request.gpu is not None:
        gpu_model = find_gpu_model(request.gpu)
    elif budget is None:
        gpu_model = _detected_gpu()
    if gpu_model is not None:
        return Target(
            name=gpu_model.name,
            budget_bytes=gpu_model.budget_bytes(budget),
            reserve_bytes=0 if budget else RESERVE_BYTES,
            overheads=overheads_on_gpu(
                gpu_model.compute_capability, request.ranks, gpu_model.usable_bytes
            ),
        )
    if budget is None:
        keys = ", ".join(known.key for known in GPU_MODELS)
        raise UsageError(
            "no known GPU detected: --gpu or --memory is required",
            next_step=f"Add --gpu with one of {keys}; or --memory 24GiB.",
        )
    return Target(
        name=f"a GPU with {format_bytes(budget)}",
        budget_bytes=budget,
        overheads=overheads_on_gpu(None, request.ranks),
    )


def _detected_gpu() -> GpuModel | None:
    """Return the model of this machine's first visible GPU; None if it is unknown."""
    with contextlib.closing(NvmlMonitor()) as monitor:
        gpus = visible_devices(monitor.devices(), os.environ)
    return gpu_model_of(gpus[0].name, gpus[0].total_bytes) if gpus else None


def _trace_request(
    config: TrainConfig, contents: SequenceContents, micro_batches: int, *, ranks: int
) -> TraceRequest:
    return TraceRequest(
        config=config,
        vocab_size=contents.vocab_size,
        special_ids=contents.special_ids,
        documents_per_sequence=contents.documents,
        micro_batches=micro_batches,
        ranks=ranks,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Predictor:
    """Predictions from traces of the step."""

    request: PredictionRequest
    target: Target
    machine: Machine

    def predict(self, config: TrainConfig) -> PredictedModel:
        """Predict one model.

        Raises:
            ExceedsMemory: If not even one sequence fits.
            CannotTrace: If it can only be measured.
        """
        target = self.target
        contents = self._contents(config)
        estimate = self._estimate(config)
        size = estimate.max_micro_batch_size
        if not size:
            raise self._does_not_fit(config, estimate)
        model = estimate.memory_model
        breakdown = memory_breakdown(model, size, target.overheads.usual)
        torch_version = importlib.metadata.version("torch")
        low, high = size_range(
            model,
            target.budget_bytes,
            target.overheads,
            max_micro_batch_size=self.request.max_micro_batch_size,
            unconfirmed_share=unconfirmed_share(
                config.device, torch_version, is_compiled=config.compile is not False
            ),
        )
        # Between this size and twice as much: for few sequences the peak may not depend
        # on their number.
        peak = float(model.running_bytes(size).max())
        doubled_peak = float(model.running_bytes(2 * size).max())
        rates = known_rates(self._machine_name(config))
        speed = None
        if rates is not None:
            work = estimate.work_near(size)
            tokens = contents.mean_non_padding_tokens
            speed = predict_speed(work, rates, config, tokens)
        is_assumed = contents.assumed
        return PredictedModel(
            model=config.model.name,
            config=config,
            parameters=estimate.parameters,
            attention=estimate.attention,
            attention_reason=estimate.attention_reason,
            budget_bytes=target.budget_bytes,
            micro_batch_size=size,
            micro_batch_size_low=min(low, size),
            micro_batch_size_high=max(high, size),
            limited=size == self.request.max_micro_batch_size,
            breakdown=breakdown,
            bytes_per_sequence=(doubled_peak - peak) / size,
            non_padding_tokens=(
                None if is_assumed else size * contents.mean_non_padding_tokens
            ),
            samples=None if is_assumed else size * contents.mean_samples,
            traces=len(model.micro_batch_sizes),
            torch=torch_version,
            speed=speed,
            shares=self._shares(breakdown, model.largest_parameter_bytes),
        )

    def _shares(
        self, breakdown: MemoryBreakdown, largest_layer_bytes: int
    ) -> tuple[Share, ...]:
        """Return the memory of one of several GPUs; empty for one GPU."""
        request = self.request
        if request.ranks * request.tensor_ranks * request.pipeline_stages == 1:
            return ()
        return shares(
            state_of_terms(breakdown.terms_bytes),
            request.ranks,
            largest_layer_bytes=largest_layer_bytes,
            tensor_ranks=request.tensor_ranks,
            pipeline_stages=request.pipeline_stages,
            budget_bytes=self.target.budget_bytes,
        )

    def _machine_name(self, config: TrainConfig) -> str:
        """Return the name under which the machine's constants are stored."""
        if config.device == "cuda":
            return self.target.name
        return SystemHost().facts(()).cpu_model or "cpu"

    def _contents(self, config: TrainConfig) -> SequenceContents:
        return sequence_contents(self.request.data, self.request.vocab_size, config)

    def _estimate(self, config: TrainConfig) -> MemoryEstimate:
        """Trace the step, and predict its memory near the largest micro-batch."""
        request = self.request
        trace_request = _trace_request(
            config,
            self._contents(config),
            2 if request.accumulate else 1,
            ranks=request.ranks,
        )
        return estimate_model(
            trace_request,
            self.machine,
            self.target.budget_bytes,
            self.target.overheads.usual,
            max_micro_batch_size=request.max_micro_batch_size,
        )

    def _largest_size(self, config: TrainConfig) -> tuple[int | None, str]:
        """Return the largest micro-batch with these settings, and a note.

        Without a prediction, the size is None and the note is the reason.
        """
        try:
            size = self._estimate(config).max_micro_batch_size
        except BadInput:
            return None, "invalid"
        except CannotTrace:
            return None, "unpredictable"
        is_limited = size == self.request.max_micro_batch_size
        return size, "or more" if is_limited else ""

    def _does_not_fit(
        self, config: TrainConfig, estimate: MemoryEstimate
    ) -> ExceedsMemory:
        """Return the error for a model of which not even one sequence fits.

        It names the largest term, and the single changes that would make one fit.
        """
        budget = self.target.budget_bytes
        model = estimate.memory_model
        breakdown = memory_breakdown(model, 1, self.target.overheads.usual)
        terms = breakdown.terms_bytes
        largest_term = max(terms, key=terms.__getitem__)
        remedies = self._single_changes(config)
        advice = "No single setting is predicted to suffice"
        if remedies:
            advice = f"Predicted to fit with {' or '.join(remedies)}"
        others = ["more memory", "a shorter --seq-length", "a smaller --model"]
        sharding = smallest_sharding(
            terms, budget, largest_layer_bytes=model.largest_parameter_bytes
        )
        if sharding is not None:
            others.append(f"a sharded state: {sharding}")
        return ExceedsMemory(
            f"one sequence of {config.seq_length_tokens} tokens of"
            f" {config.model.name!r} is predicted to exceed the memory budget of"
            f" {format_bytes(budget)}; {format_bytes(breakdown.peak_bytes)} needed;"
            f" largest part: {largest_term}, {format_bytes(terms[largest_term])}",
            next_step=f"{advice}. Or use {', '.join(others[:-1])}, or {others[-1]}.",
        )

    def _single_changes(self, config: TrainConfig) -> list[str]:
        """Return the options that each suffice for one sequence, with the size."""
        options = []
        for setting, value in _SINGLE_CHANGES:
            if getattr(config, setting) == value:
                continue
            changed = config.model_copy(update={setting: value})
            size, _ = self._largest_size(changed)
            if size:
                option = f"--{setting.replace('_', '-')} {value}"
                options.append(f"{option} (micro-batch size {size})")
        return options

    def what_ifs(self, update: Update) -> Iterator[Mapping[str, Any]]:
        """Yield the largest micro-batch of every combination of settings."""
        combinations = [
            (config, settings)
            for config in self.request.configs
            for settings in _alternatives(config)
        ]
        for number, (config, settings) in enumerate(combinations):
            words = f"{config.model.name} {' '.join(settings.values())}"
            update(number, len(combinations), f"alternatives: {words}")
            yield from self._what_ifs_by_layout(config, settings)

    def _what_ifs_by_layout(
        self, config: TrainConfig, settings: Mapping[str, str]
    ) -> Iterator[Mapping[str, Any]]:
        is_known = _is_known(config)
        is_varlen = settings["attention"] == "varlen"
        # Attention kernels of variable length have no dropout.
        without_dropout = {"attention_dropout": 0.0} if is_varlen else {}
        largest: dict[bool, tuple[int | None, str]] = {}
        for layout in ("packed", "padded") if is_known else ("padded",):
            changed = config.model_copy(
                update={**settings, "layout": layout, **without_dropout}
            )
            # The layout changes memory only if documents are computed one by one.
            one_by_one = is_varlen and layout == "packed"
            if one_by_one not in largest:
                largest[one_by_one] = self._largest_size(changed)
            size, note = largest[one_by_one]
            contents = self._contents(changed)
            tokens = None
            if size is not None and not contents.assumed:
                tokens = size * contents.mean_non_padding_tokens
            yield {
                "model": config.model.name,
                **settings,
                "attention": settings["attention"] if is_known else "row",
                "layout": layout,
                "micro_batch_size": size,
                "non_padding_tokens": tokens,
                "note": note,
            }


def _alternatives(config: TrainConfig) -> Iterator[dict[str, str]]:
    """Yield the combinations of settings that exist for a model."""
    attentions: tuple[str, ...] = ("sdpa",)
    if not _is_known(config):
        # Encoders that this project does not know keep their own attention.
        attentions = ("auto",)
    elif config.device == "cuda":
        attentions = ("varlen", "sdpa")
    for values in itertools.product(
        ("bf16", "fp32"),
        attentions,
        ("none", "selective", "full"),
        ("sparse", "dense"),
    ):
        settings = dict(zip(_ALTERNATIVES, values, strict=True))
        # There is no such kernel.
        if settings["precision"] == "fp32" and settings["attention"] == "varlen":
            continue
        yield settings


def _is_known(config: TrainConfig) -> bool:
    return config.model.config["model_type"] in FAMILIES


def predicted_gains(
    train: TrainConfig,
    vocab_size: int,
    rates: MachineRates,
    changes: Mapping[str, Mapping[str, object]],
    update: Update,
) -> dict[str, float]:
    """Predict the ratio of tokens/s with each change of settings to those without.

    Returns:
        Ratios by name of the change, without changes that cannot be traced; empty if
        the present settings cannot be.
    """

    def tokens_per_s(config: TrainConfig, machine: Machine) -> float:
        contents = sequence_contents(None, vocab_size, config)
        request = _trace_request(config, contents, 1, ranks=1)
        work = traced_work(request, machine)
        return predict_speed(work, rates, config).padded_tokens_per_s.value

    steps = 1 + len(changes)
    gains: dict[str, float] = {}
    with ForkServerMachine() as machine:
        update(0, None, "loading torch")
        machine.start()
        update(0, steps, "predicting the present step")
        try:
            present = tokens_per_s(train.model_copy(), machine)
        except (CannotTrace, BadInput):
            return {}
        for number, (name, change) in enumerate(changes.items(), start=1):
            update(number, steps, f"predicting {name}")
            config = train.model_copy(update=dict(change))
            with contextlib.suppress(CannotTrace, BadInput):
                gains[name] = tokens_per_s(config, machine) / present
    return gains


def memory_of_probe(profile: Profile) -> MemoryPlan | None:
    """Return the memory of the profile's micro-batch.

    The probe traced its largest one; a trial of the same size corrects the trace.

    Returns:
        None without a trace, or if it is a rank's share.
    """
    probe, train = profile.evidence.probe, profile.train
    if probe is None or not probe.traced_terms_bytes or probe.parameters is None:
        return None
    # Formulas would divide a share once more.
    if probe.local_ranks > 1 and train.parallel.strategy != "ddp":
        return None
    limit = with_headroom(probe.feasible_max, profile.constraints.headroom_share)
    return MemoryPlan(
        parameters=PlanFigure(
            value=probe.parameters, basis="measured", source="counted by the probe"
        ),
        state=_calibrated(
            state_of_terms(probe.traced_terms_bytes),
            probe.feasible_peak_bytes,
            size_share=train.micro_batch_size / probe.feasible_max,
        ),
        micro_batch_size=train.micro_batch_size,
        max_micro_batch_size=max(train.micro_batch_size, limit),
        largest_bytes=largest_gather_bytes(train, probe.parameters),
        source=(
            "the probe's trace, corrected by the measured peak of the largest verified"
            f" micro-batch, {probe.feasible_max}"
        ),
    )


def _calibrated(
    traced: StateBytes, peak_bytes: int, *, size_share: float
) -> StateBytes:
    """Return a traced memory corrected by its measured peak, at another micro-batch.

    Parameters, gradients and optimizer state are exact. Everything else takes the rest
    of the peak; activations and head then follow the micro-batch size.

    Args:
        traced: Memory of the micro-batch size whose peak was measured.
        peak_bytes: The measured peak.
        size_share: The other micro-batch size over the measured one.
    """
    other_bytes = traced.total_bytes - traced.state_bytes
    correction = 1.0
    if other_bytes > 0 and peak_bytes > traced.state_bytes:
        correction = (peak_bytes - traced.state_bytes) / other_bytes
    by_size = correction * size_share
    return replace(
        traced,
        activations_bytes=round(traced.activations_bytes * by_size),
        head_and_loss_bytes=round(traced.head_and_loss_bytes * by_size),
        temporaries_bytes=round(traced.temporaries_bytes * correction),
        non_pytorch_bytes=round(traced.non_pytorch_bytes * correction),
    )


def trace_memory(
    train: TrainConfig,
    fleet: Fleet,
    gpu_model: GpuModel | None,
    contents: SequenceContents,
    update: Update,
    *,
    sequences_per_rank: int,
) -> MemoryPlan | CannotTrace:
    """Trace the trainer's step now, as ``autotune estimate`` does.

    Returns:
        The memory with the largest micro-batch that fits a rank alone, but no more than
        ``sequences_per_rank``; the error if the step cannot be traced.
    """
    overheads = _fleet_overheads(fleet, gpu_model).usual
    # Under any other strategy a rank's share is traced, and formulas would divide it
    # once more.
    unshared = train.parallel.model_copy(
        update={"strategy": "ddp", "shard_ranks": None}
    )
    config = train.model_copy(update={"parallel": unshared})
    with ForkServerMachine() as machine:
        update(0, None, "loading torch")
        machine.start()
        update(0, None, f"tracing {train.model.name}")
        try:
            estimate = estimate_model(
                _trace_request(config, contents, 2, ranks=fleet.ranks),
                machine,
                fleet.memory_bytes,
                overheads,
                max_micro_batch_size=MAX_MICRO_BATCH_SIZE,
            )
        except CannotTrace as error:
            return error
    model, parameters = estimate.memory_model, estimate.parameters
    fitting = 0
    if estimate.max_micro_batch_size:
        fitting = with_headroom(estimate.max_micro_batch_size, HEADROOM_SHARE)
    size = max(1, min(fitting, sequences_per_rank))
    basis: Basis = "predicted"
    source = "counted in the traced model"
    if contents.assumed:
        basis = "assumed"
        source += f"; vocabulary of {contents.vocab_size:,} assumed"
    breakdown = memory_breakdown(model, size, overheads)
    return MemoryPlan(
        parameters=PlanFigure(value=parameters, basis=basis, source=source),
        state=state_of_terms(breakdown.terms_bytes),
        micro_batch_size=size,
        max_micro_batch_size=fitting,
        work=estimate.work_near(size),
        largest_bytes=max(
            model.largest_parameter_bytes, largest_gather_bytes(train, parameters)
        ),
        source="a trace of the trainer's step, with assumed overheads",
    )


def _fleet_overheads(fleet: Fleet, gpu_model: GpuModel | None) -> OverheadsRange:
    if fleet.device == "cpu":
        return overheads_on_cpu()
    if gpu_model is None:
        return overheads_on_gpu(None, fleet.ranks_per_node, math.inf)
    return overheads_on_gpu(
        gpu_model.compute_capability, fleet.ranks_per_node, gpu_model.usable_bytes
    )


def with_shares(
    memory: MemoryPlan,
    fleet: Fleet,
    tensor_ranks: int,
    pipeline_stages: int,
    *,
    is_verified: bool,
) -> MemoryPlan:
    """Return the plan with the memory under every way of sharing the model."""
    # A trial verified that it fits, whatever a trace predicts.
    verified_bytes = memory.state.total_bytes if is_verified else 0
    by_strategy = shares(
        memory.state,
        fleet.ranks,
        largest_layer_bytes=memory.largest_bytes,
        tensor_ranks=tensor_ranks if tensor_ranks <= fleet.ranks else 1,
        pipeline_stages=pipeline_stages if pipeline_stages <= fleet.ranks else 1,
        budget_bytes=max(fleet.memory_bytes, verified_bytes),
    )
    return replace(memory, shares=by_strategy)


def max_micro_batch_size_shared(memory: MemoryPlan, fleet: Fleet) -> int:
    """Return the largest micro-batch that fits if all ranks share the state.

    At least one sequence.
    """
    share = zero_share(
        memory.state, 3, fleet.ranks, largest_layer_bytes=memory.largest_bytes
    )
    sequence_bytes = (
        share.activations_bytes + share.head_and_loss_bytes
    ) / memory.micro_batch_size
    fixed_bytes = share.total_bytes - sequence_bytes * memory.micro_batch_size
    free_bytes = fleet.memory_bytes - fixed_bytes
    fitting = int(free_bytes // max(1.0, sequence_bytes))
    return max(1, with_headroom(fitting, HEADROOM_SHARE))


def strategy_that_fits(memory: MemoryPlan, strategy: Strategy) -> Strategy:
    """Return the strategy, or one that shares the state if the model needs it.

    If the strategy is DDP and the model does not fit, return ZeRO-1 if it fits with
    that, else FSDP2.
    """
    if memory.max_micro_batch_size > 0 or strategy != "ddp":
        return strategy
    for share in memory.shares:
        if share.fits and share.name in _STRATEGIES:
            return _STRATEGIES[share.name]
    return "fsdp2"
