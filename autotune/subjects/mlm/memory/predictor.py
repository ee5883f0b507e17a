"""Prediction of the largest micro-batch of a model, from traces of its step."""

import importlib.metadata
from dataclasses import dataclass

from autotune.base.units import format_bytes
from autotune.corpus.values import SequenceContents
from autotune.errors import BadInput, ExceedsMemory
from autotune.machine.host import SystemHost
from autotune.memory.decide.memory_model import (
    MemoryModel,
    memory_breakdown,
    size_range,
)
from autotune.memory.decide.overheads import unconfirmed_share
from autotune.memory.decide.sharding import (
    parts_of_terms,
    shares,
    smallest_sharding,
)
from autotune.memory.estimate import CannotTrace, MemoryEstimate, estimate_model
from autotune.memory.values import MemoryBreakdown, Share
from autotune.speed.decide import predict_speed
from autotune.speed.measure import known_rates
from autotune.speed.values import SpeedPrediction, StepWork
from autotune.subjects.mlm.memory.contents import sequence_contents
from autotune.subjects.mlm.memory.target import PredictionRequest, Target
from autotune.subjects.mlm.memory.trace_request import trace_request
from autotune.subjects.mlm.memory.values import PredictedModel
from autotune.trials.trial_machine import Machine
from trainer.formats.train_config import TrainConfig

_MEMORY_SAVERS = {
    "--precision bf16": {"precision": "bf16"},
    "--activation-checkpointing full": {"activation_checkpointing": "full"},
    "--mlm-head sparse": {"mlm_head": "sparse"},
}
"""Settings that save memory, by option of ``autotune estimate``; they are tried one by
one if a model does not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestSize:
    """Predicted largest micro-batch with some settings."""

    micro_batch_size: int | None
    """0 if not even one sequence fits; None without a prediction."""
    note: str
    """Reason for a missing prediction; ``or more`` if larger sizes were not tried;
    otherwise empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictor:
    """Predicts the largest micro-batch of models for one target."""

    request: PredictionRequest
    """The models and their settings."""
    target: Target
    """The device to predict for."""
    machine: Machine
    """Runs the traces, in child processes."""

    def predict(self, config: TrainConfig) -> PredictedModel:
        """Predict the largest micro-batch of one model, with its memory and speed.

        Raises:
            ExceedsMemory: If not even one sequence fits.
            CannotTrace: If the memory can only be measured.
            BadInput: If the settings are invalid.
        """
        contents = self.contents(config)
        estimate = self._estimate(config)
        size = estimate.max_micro_batch_size
        if not size:
            raise self._too_large_error(config, estimate)
        model = estimate.memory_model
        breakdown = memory_breakdown(model, size, self.target.overheads.usual)
        torch_version = importlib.metadata.version("torch")
        low, high = self._size_range(config, model, torch_version)
        non_padding_tokens = None
        samples = None
        if not contents.assumed:
            non_padding_tokens = size * contents.mean_non_padding_tokens
            samples = size * contents.mean_samples
        return PredictedModel(
            model=config.model.name,
            config=config,
            parameters=estimate.parameters,
            attention=estimate.attention,
            attention_reason=estimate.attention_reason,
            budget_bytes=self.target.budget_bytes,
            micro_batch_size=size,
            micro_batch_size_low=min(low, size),
            micro_batch_size_high=max(high, size),
            limited=size == self.request.max_micro_batch_size,
            breakdown=breakdown,
            bytes_per_sequence=_bytes_per_sequence(model, size),
            non_padding_tokens=non_padding_tokens,
            samples=samples,
            traces=len(model.micro_batch_sizes),
            torch=torch_version,
            speed=self._speed(config, estimate.work_near(size), contents),
            shares=self._shares(breakdown, model.largest_parameter_bytes),
        )

    def largest_size(self, config: TrainConfig) -> LargestSize:
        """Predict the largest micro-batch only; an error becomes the ``note``."""
        try:
            size = self._estimate(config).max_micro_batch_size
        except BadInput:
            return LargestSize(micro_batch_size=None, note="invalid")
        except CannotTrace:
            return LargestSize(micro_batch_size=None, note="unpredictable")
        is_limited = size == self.request.max_micro_batch_size
        return LargestSize(micro_batch_size=size, note="or more" if is_limited else "")

    def contents(self, config: TrainConfig) -> SequenceContents:
        """Return the contents of sequences: the dataset's, or else assumed ones."""
        return sequence_contents(self.request.data, self.request.vocab_size, config)

    def _estimate(self, config: TrainConfig) -> MemoryEstimate:
        """Trace the step, and predict its memory near the largest micro-batch.

        Raises:
            CannotTrace: If the memory can only be measured.
            BadInput: If the settings are invalid.
        """
        # Two micro-batches need as much memory as any larger number of them: gradients
        # exist while the second one is computed.
        micro_batches = 2 if self.request.accumulate else 1
        return estimate_model(
            trace_request(
                config, self.contents(config), micro_batches, ranks=self.request.ranks
            ),
            self.machine,
            self.target.budget_bytes,
            self.target.overheads.usual,
            max_micro_batch_size=self.request.max_micro_batch_size,
        )

    def _size_range(
        self, config: TrainConfig, model: MemoryModel, torch_version: str
    ) -> tuple[int, int]:
        """Return the range of the largest micro-batch, its lower end first."""
        return size_range(
            model,
            self.target.budget_bytes,
            self.target.overheads,
            max_micro_batch_size=self.request.max_micro_batch_size,
            unconfirmed_share=unconfirmed_share(
                config.device, torch_version, is_compiled=config.compile is not False
            ),
        )

    def _speed(
        self, config: TrainConfig, work: StepWork, contents: SequenceContents
    ) -> SpeedPrediction | None:
        """Predict the speed of the step.

        Returns:
            None if the machine's constants are not known.
        """
        # Constants are stored by the name of the GPU, or of the CPU.
        machine_name = self.target.name
        if config.device != "cuda":
            machine_name = SystemHost().facts(paths=()).cpu_model or "cpu"
        rates = known_rates(machine_name)
        if rates is None:
            return None
        return predict_speed(work, rates, config, contents.mean_non_padding_tokens)

    def _shares(
        self, breakdown: MemoryBreakdown, largest_layer_bytes: int
    ) -> tuple[Share, ...]:
        """Return the memory under each way of sharing the model; empty for one GPU."""
        request = self.request
        if request.ranks * request.tensor_ranks * request.pipeline_stages == 1:
            return ()
        return shares(
            parts_of_terms(breakdown.terms_bytes),
            request.ranks,
            largest_layer_bytes=largest_layer_bytes,
            tensor_ranks=request.tensor_ranks,
            pipeline_stages=request.pipeline_stages,
            budget_bytes=self.target.budget_bytes,
        )

    def _too_large_error(
        self, config: TrainConfig, estimate: MemoryEstimate
    ) -> ExceedsMemory:
        """Return the error for a model of which not even one sequence fits.

        It names the largest term, and the changes with which one sequence would fit.
        """
        budget_bytes = self.target.budget_bytes
        model = estimate.memory_model
        breakdown = memory_breakdown(model, 1, self.target.overheads.usual)
        largest_term = breakdown.largest_term
        largest_bytes = breakdown.terms_bytes[largest_term]
        options = self._sufficient_options(config)
        advice = "No single setting is predicted to suffice"
        if options:
            advice = f"Predicted to fit with {' or '.join(options)}"
        other_remedies = ["more memory", "a shorter --seq-length", "a smaller --model"]
        sharding = smallest_sharding(
            breakdown.terms_bytes,
            budget_bytes,
            largest_layer_bytes=model.largest_parameter_bytes,
        )
        if sharding is not None:
            other_remedies.append(f"a sharded state: {sharding}")
        *remedies, last_remedy = other_remedies
        return ExceedsMemory(
            f"one sequence of {config.seq_length_tokens} tokens of"
            f" {config.model.name!r} is predicted to exceed the memory budget of"
            f" {format_bytes(budget_bytes)}; {format_bytes(breakdown.peak_bytes)}"
            f" needed; largest part: {largest_term}, {format_bytes(largest_bytes)}",
            next_step=f"{advice}. Or use {', '.join(remedies)}, or {last_remedy}.",
        )

    def _sufficient_options(self, config: TrainConfig) -> list[str]:
        """Return the options that make one sequence fit, each of them alone.

        Each option is followed by the largest micro-batch that is predicted with it.
        """
        sufficient = []
        for option, settings in _MEMORY_SAVERS.items():
            changed = config.model_copy(update=settings)
            if changed == config:
                continue
            size = self.largest_size(changed).micro_batch_size
            if size:
                sufficient.append(f"{option} (micro-batch size {size})")
        return sufficient


def _bytes_per_sequence(model: MemoryModel, micro_batch_size: int) -> float:
    """Return the growth of the peak per sequence, between this size and its double.

    Smaller sizes would not do: for few sequences the peak may not depend on their
    number.
    """
    peak_bytes = float(model.running_bytes(micro_batch_size).max())
    doubled_bytes = float(model.running_bytes(2 * micro_batch_size).max())
    return (doubled_bytes - peak_bytes) / micro_batch_size
