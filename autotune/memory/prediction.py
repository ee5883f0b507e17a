"""Memory predictions for ``autotune estimate`` and ``autotune plan``: the largest micro-batch, and alternatives."""

import contextlib
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
from autotune.memory.decide.memory_model import (
    Expected,
    expected_on_cpu,
    expected_on_gpu,
    memory_breakdown,
    size_range,
)
from autotune.memory.decide.sharding import (
    fewest_that_share,
    shares,
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
    MemoryPlan,
    PredictedModel,
    Share,
    TraceRequest,
)
from autotune.plan.values import Basis, Fleet, PlanFigure
from autotune.profiles.decide.batch_split import (
    default_layout,
    default_precision,
    with_headroom,
)
from autotune.profiles.values import Profile
from autotune.speed.decide import predict_speed
from autotune.speed.measure import known_rates
from autotune.speed.values import MachineRates
from autotune.trials.fork_server import ForkServerMachine, Machine
from trainer.config.train_config import ModelSettings, Strategy, TrainConfig
from trainer.model.families import FAMILIES
from trainer.record.progress import Update


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
    expected: Expected
    reserve_bytes: int = 0
    """GPU memory that is left out of the budget."""


def predict(
    asked: PredictionRequest, target: Target, *, what_if: bool, update: Update
) -> tuple[Answer, Mapping[str, AutotuneError]]:
    """Predict every model.

    One that does not fit, or can only be measured, does not affect the others.
    """
    predicted: list[PredictedModel] = []
    rejected: dict[str, AutotuneError] = {}
    with ForkServerMachine() as machine:
        update(0, None, "loading torch")
        machine.start()
        tracer = _Tracer(asked=asked, target=target, machine=machine)
        for number, config in enumerate(asked.configs):
            update(number, len(asked.configs), f"tracing {config.model.name}")
            try:
                predicted.append(tracer.predict(config))
            except (CannotTrace, ExceedsMemory) as error:
                rejected[config.model.name] = error
        alternatives = tuple(tracer.what_ifs(update)) if what_if else ()
    told = ("exit_code", "message", "next_step")
    answer = Answer(
        target=target.name,
        reserve_bytes=target.reserve_bytes,
        models=tuple(predicted),
        what_if=alternatives,
        rejected={
            name: {one: getattr(error, one) for one in told}
            for name, error in rejected.items()
        },
    )
    return answer, rejected


def find_target(asked: PredictionRequest) -> Target:
    """Return the GPU to predict for, with its memory budget.

    Raise ``BadInput`` if it is not found, or has less memory; ``UsageError`` if its
    memory is unknown, or it is a CPU.
    """
    budget = asked.memory_bytes
    if asked.configs[0].device == "cpu":
        if budget is None or asked.gpu is not None:
            what = "--device cpu requires --memory, without --gpu"
            raise UsageError(what, next_step="Try --device cpu --memory 2GiB.")
        return Target(
            name=f"a CPU with {format_bytes(budget)}",
            budget_bytes=budget,
            expected=expected_on_cpu(),
        )
    gpu_model = (
        find_gpu_model(asked.gpu)
        if asked.gpu is not None
        else _gpu_here()
        if budget is None
        else None
    )
    if gpu_model is not None:
        expected = expected_on_gpu(
            gpu_model.compute_capability, asked.ranks, gpu_model.usable_bytes
        )
        reserve, size = 0 if budget else RESERVE_BYTES, gpu_model.budget_bytes(budget)
        return Target(
            name=gpu_model.name,
            budget_bytes=size,
            reserve_bytes=reserve,
            expected=expected,
        )
    if budget is None:
        next_step = (
            f"Add --gpu with one of {', '.join(one.key for one in GPU_MODELS)}; or"
            " --memory 24GiB."
        )
        raise UsageError(
            "no known GPU detected: --gpu or --memory is required", next_step=next_step
        )
    expected = expected_on_gpu(None, asked.ranks)
    return Target(
        name=f"a GPU with {format_bytes(budget)}",
        budget_bytes=budget,
        expected=expected,
    )


def _gpu_here() -> GpuModel | None:
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
class _Tracer:
    """Predictions from traces of the step."""

    asked: PredictionRequest
    target: Target
    machine: Machine

    def predict(self, config: TrainConfig) -> PredictedModel:
        asked, target, expected = self.asked, self.target, self.target.expected
        hold = sequence_contents(asked.data, asked.vocab_size, config)
        estimate = self._traced(config)
        if not (rows := estimate.max_micro_batch_size):
            raise self._does_not_fit(config, estimate)
        fit, budget, found = (
            estimate.fit,
            target.budget_bytes,
            memory_breakdown(estimate.fit, rows, expected.usual),
        )
        low, high = size_range(
            fit, budget, expected, max_micro_batch_size=asked.max_micro_batch_size
        )
        # Between this size and twice as much: for few sequences the peak may not depend
        # on their number.
        peaks = [float(fit.running_bytes(count).max()) for count in (rows, 2 * rows)]
        shared: tuple[Share, ...] = ()
        if asked.ranks * asked.tensor_ranks * asked.pipeline_stages > 1:
            shared = shares(
                state_of_terms(found.terms_bytes),
                asked.ranks,
                largest_layer_bytes=fit.largest_parameter_bytes,
                tensor_ranks=asked.tensor_ranks,
                pipeline_stages=asked.pipeline_stages,
                budget_bytes=budget,
            )
        rates = known_rates(
            target.name
            if config.device == "cuda"
            else SystemHost().facts(()).cpu_model or "cpu"
        )
        work, tokens = estimate.work_near(rows), hold.mean_non_padding_tokens
        told = {
            name: getattr(estimate, name)
            for name in ("parameters", "attention", "attention_reason")
        }
        return PredictedModel(
            model=config.model.name,
            config=config,
            **told,
            budget_bytes=budget,
            micro_batch_size=rows,
            micro_batch_size_low=min(low, rows),
            micro_batch_size_high=max(high, rows),
            limited=rows == asked.max_micro_batch_size,
            breakdown=found,
            bytes_per_sequence=(peaks[1] - peaks[0]) / rows,
            non_padding_tokens=(
                None if hold.assumed else rows * hold.mean_non_padding_tokens
            ),
            samples=None if hold.assumed else rows * hold.mean_samples,
            traces=len(fit.rows),
            speed=None if rates is None else predict_speed(work, rates, config, tokens),
            shares=shared,
        )

    def _traced(self, config: TrainConfig) -> MemoryEstimate:
        asked, budget, usual = (
            self.asked,
            self.target.budget_bytes,
            self.target.expected.usual,
        )
        hold = sequence_contents(asked.data, asked.vocab_size, config)
        request = _trace_request(
            config, hold, 2 if asked.accumulate else 1, ranks=asked.ranks
        )
        return estimate_model(
            request,
            self.machine,
            budget,
            usual,
            max_micro_batch_size=asked.max_micro_batch_size,
        )

    def _rows_or_why(self, config: TrainConfig) -> tuple[int | None, str]:
        """Return the largest micro-batch with these settings, and a note: the reason if there is none."""
        try:
            rows = self._traced(config).max_micro_batch_size
        except BadInput:
            return None, "invalid"
        except CannotTrace:
            return None, "unpredictable"
        return rows, "or more" if rows == self.asked.max_micro_batch_size else ""

    def _does_not_fit(
        self, config: TrainConfig, estimate: MemoryEstimate
    ) -> ExceedsMemory:
        """Return the error with the largest term and the single changes that would make one sequence fit."""
        budget = self.target.budget_bytes
        found = memory_breakdown(estimate.fit, 1, self.target.expected.usual)
        term, size = max(found.terms_bytes.items(), key=lambda item: item[1])
        helps = []
        for option, value in (
            ("precision", "bf16"),
            ("activation_checkpointing", "full"),
            ("mlm_head", "sparse"),
        ):
            if getattr(config, option) != value:
                rows, _ = self._rows_or_why(config.model_copy(update={option: value}))
                helps += (
                    [f"--{option.replace('_', '-')} {value} (micro-batch size {rows})"]
                    if rows
                    else []
                )
        advice = (
            f"Predicted to fit with {' or '.join(helps)}"
            if helps
            else "No single setting is predicted to suffice"
        )
        largest = estimate.fit.largest_parameter_bytes
        shared = fewest_that_share(
            found.terms_bytes, budget, largest_layer_bytes=largest
        )
        otherwise = ["more memory", "a shorter --seq-length", "a smaller --model"]
        otherwise += [] if shared is None else [f"a sharded state: {shared}"]
        return ExceedsMemory(
            f"one sequence of {config.seq_length_tokens} tokens of"
            f" {config.model.name!r} is predicted to exceed the memory budget of"
            f" {format_bytes(budget)}; {format_bytes(found.peak_bytes)} needed; largest"
            f" part: {term}, {format_bytes(size)}",
            next_step=(
                f"{advice}. Or use {', '.join(otherwise[:-1])}, or {otherwise[-1]}."
            ),
        )

    def what_ifs(self, update: Update) -> Iterator[Mapping[str, Any]]:
        on_gpu = self.asked.configs[0].device == "cuda"
        combinations = [
            (
                config,
                dict(
                    zip(
                        (
                            "precision",
                            "attention",
                            "activation_checkpointing",
                            "mlm_head",
                        ),
                        values,
                        strict=True,
                    )
                ),
            )
            for config in self.asked.configs
            for values in itertools.product(
                ("bf16", "fp32"),
                # Encoders that this project does not know keep their own attention.
                (
                    (("varlen", "sdpa") if on_gpu else ("sdpa",))
                    if _is_known(config)
                    else ("auto",)
                ),
                ("none", "selective", "full"),
                ("sparse", "dense"),
            )
            if values[:2] != ("fp32", "varlen")  # there is no such kernel
        ]
        for number, (config, settings) in enumerate(combinations):
            model, known, varlen = (
                config.model.name,
                _is_known(config),
                settings["attention"] == "varlen",
            )
            update(
                number,
                len(combinations),
                f"alternatives: {model} {' '.join(settings.values())}",
            )
            without_dropout = {"attention_dropout": 0.0} if varlen else {}
            found: dict[bool, tuple[int | None, str]] = {}
            for layout in ("packed", "padded") if known else ("padded",):
                changed = config.model_copy(
                    update={**settings, "layout": layout, **without_dropout}
                )
                # The layout changes memory only if documents are computed one by one.
                same = varlen and layout == "packed"
                if same not in found:
                    found[same] = self._rows_or_why(changed)
                rows, note = found[same]
                hold = sequence_contents(
                    self.asked.data, self.asked.vocab_size, changed
                )
                tokens = (
                    None
                    if hold.assumed or rows is None
                    else rows * hold.mean_non_padding_tokens
                )
                shown = settings | {
                    "attention": settings["attention"] if known else "row",
                    "layout": layout,
                }
                yield {
                    "model": model,
                    **shown,
                    "micro_batch_size": rows,
                    "non_padding_tokens": tokens,
                    "note": note,
                }


def _is_known(config: TrainConfig) -> bool:
    return config.model.config["model_type"] in FAMILIES


def predicted_gains(
    train: TrainConfig,
    vocab_size: int,
    rates: MachineRates,
    changes: Mapping[str, Mapping[str, object]],
    update: Update,
) -> dict[str, float]:
    """Return the ratio of predicted tokens/s with each change of settings to those without; if they can be traced."""
    found: dict[str, float] = {}
    with ForkServerMachine() as machine:
        update(0, None, "loading torch")
        machine.start()
        for number, (name, changed) in enumerate([("", {}), *changes.items()]):
            update(number, 1 + len(changes), f"predicting {name or 'the present step'}")
            config = train.model_copy(update=dict(changed))
            contents = sequence_contents(None, vocab_size, config)
            try:
                work = traced_work(
                    _trace_request(config, contents, 1, ranks=1), machine
                )
            except (CannotTrace, BadInput):
                if not name:
                    return {}
                continue
            found[name] = predict_speed(work, rates, config).padded_tokens_per_s.value
    return {name: rate / found[""] for name, rate in found.items() if name}


def memory_of_probe(profile: Profile) -> MemoryPlan | None:
    """Return the memory that the profile's probe traced.

    None without a trace, or if it is a rank's share.
    """
    probe, train = profile.evidence.probe, profile.train
    if probe is None or not probe.traced_terms_bytes or probe.parameters is None:
        return None
    # Formulas would divide a share once more.
    if probe.local_ranks > 1 and train.parallel.strategy != "ddp":
        return None
    most = with_headroom(probe.feasible_max, profile.constraints.headroom_share)
    return MemoryPlan(
        parameters=PlanFigure(
            value=probe.parameters, basis="measured", source="counted by the probe"
        ),
        state=state_of_terms(probe.traced_terms_bytes),
        micro_batch_size=probe.feasible_max,
        max_micro_batch_size=max(train.micro_batch_size, most),
        largest_bytes=largest_gather_bytes(train, probe.parameters),
        source=(
            "the probe's trace; the largest verified micro-batch is"
            f" {probe.feasible_max}"
        ),
    )


def traced(
    train: TrainConfig,
    fleet: Fleet,
    gpu_model: GpuModel | None,
    contents: SequenceContents,
    update: Update,
    *,
    rows_per_rank: int,
) -> MemoryPlan | CannotTrace:
    """Trace the trainer's step now, as ``autotune estimate`` does."""
    capability, size = (
        (None, math.inf)
        if gpu_model is None
        else (gpu_model.compute_capability, gpu_model.usable_bytes)
    )
    expected = (
        expected_on_cpu()
        if fleet.device == "cpu"
        else expected_on_gpu(capability, fleet.ranks_per_node, size)
    )
    # Under any other strategy a rank's share is traced, and formulas would divide it
    # once more.
    whole = train.parallel.model_copy(update={"strategy": "ddp", "shard_ranks": None})
    config = train.model_copy(update={"parallel": whole})
    with ForkServerMachine() as machine:
        update(0, None, "loading torch")
        machine.start()
        update(0, None, f"tracing {train.model.name}")
        try:
            request, most = (
                _trace_request(config, contents, 2, ranks=fleet.ranks),
                MAX_MICRO_BATCH_SIZE,
            )
            estimate = estimate_model(
                request,
                machine,
                fleet.memory_bytes,
                expected.usual,
                max_micro_batch_size=most,
            )
        except CannotTrace as error:
            return error
    fit, parameters, most = (
        estimate.fit,
        estimate.parameters,
        estimate.max_micro_batch_size,
    )
    fitting = with_headroom(most, HEADROOM_SHARE) if most else 0
    rows = max(1, min(fitting, rows_per_rank))
    told = (
        f"; vocabulary of {contents.vocab_size:,} assumed" if contents.assumed else ""
    )
    basis: Basis = "assumed" if contents.assumed else "predicted"
    return MemoryPlan(
        parameters=PlanFigure(
            value=parameters, basis=basis, source=f"counted in the traced model{told}"
        ),
        state=state_of_terms(memory_breakdown(fit, rows, expected.usual).terms_bytes),
        micro_batch_size=rows,
        max_micro_batch_size=fitting,
        work=estimate.work_near(rows),
        largest_bytes=max(
            fit.largest_parameter_bytes, largest_gather_bytes(train, parameters)
        ),
        source="a trace of the trainer's step, with assumed overheads",
    )


def shared(
    memory: MemoryPlan,
    fleet: Fleet,
    tensor_ranks: int,
    pipeline_stages: int,
    *,
    is_verified: bool,
) -> MemoryPlan:
    """Return the plan with the memory under every way of sharing the model among the ranks."""
    tensor, stages = (
        count if count <= fleet.ranks else 1
        for count in (tensor_ranks, pipeline_stages)
    )
    # A trial verified that it fits, whatever a trace predicts.
    verified_bytes = memory.state.total_bytes if is_verified else 0
    found = shares(
        memory.state,
        fleet.ranks,
        largest_layer_bytes=memory.largest_bytes,
        tensor_ranks=tensor,
        pipeline_stages=stages,
        budget_bytes=max(fleet.memory_bytes, verified_bytes),
    )
    return replace(memory, shares=found)


def max_micro_batch_size_shared(memory: MemoryPlan, fleet: Fleet) -> int:
    """Return the largest micro-batch that fits if all ranks share the state.

    At least one sequence.
    """
    whole = zero_share(
        memory.state, 3, fleet.ranks, largest_layer_bytes=memory.largest_bytes
    )
    of_a_row = (
        whole.activations_bytes + whole.head_and_loss_bytes
    ) / memory.micro_batch_size
    room = fleet.memory_bytes - (whole.total_bytes - of_a_row * memory.micro_batch_size)
    return max(1, with_headroom(int(room // max(1.0, of_a_row)), HEADROOM_SHARE))


def strategy_that_fits(memory: MemoryPlan, said: Strategy) -> Strategy:
    """Return ``said``.

    If it is DDP and the model does not fit, ZeRO-1 if it fits with that, else FSDP2.
    """
    if memory.max_micro_batch_size > 0 or said != "ddp":
        return said
    names: dict[str, Strategy] = {"ZeRO-1": "zero1", "ZeRO-3 (FSDP2)": "fsdp2"}
    return next(
        (names[one.name] for one in memory.shares if one.fits and one.name in names),
        "fsdp2",
    )
