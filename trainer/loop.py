"""The training loop, readable top to bottom."""

import importlib.metadata
import math
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from trainer.checkpoint import export_model
from trainer.config import ResolvedConfig, TrainConfig, accumulation_steps
from trainer.dataset import TokenDataset
from trainer.errors import BadConfig, TrainingFailed
from trainer.feed import MicroBatch, MicroBatchSource, make_loader, micro_batch_plans
from trainer.model import build_config, build_model
from trainer.monitor import Monitor
from trainer.parallel import Ranks, share_gradients
from trainer.plan import BatchPlan
from trainer.record import MODEL_DIRECTORY, RUN_SCHEMA_VERSION, RunHeader, RunWriter, StepRow, utc_now
from trainer.step import StepResult, TrainStep, learning_rate, make_optimizer

Announce = Callable[[StepRow, int], None]
"""Called on rank 0 with a logged step and the number of steps of the run."""


def train(resolved: ResolvedConfig, ranks: Ranks, writer: RunWriter, announce: Announce) -> None:
    """Train to the end and save the model.

    Raises:
        BadConfig: If dataset or model do not fit the configuration.
        TrainingFailed: If the loss is not a number.
    """
    transformers_logging.disable_progress_bar()  # the run has a bar of its own
    config = resolved.config
    dataset = open_dataset(resolved)
    plan = make_plan(config, len(dataset), ranks.world_size)
    model, attention = make_model(config, dataset, ranks)
    shared = share_gradients(model, config, ranks)
    step = TrainStep(shared, make_optimizer(shared, config), config, ranks)
    writer.start(_header(resolved, dataset, plan, model=model, attention=attention, ranks=ranks))

    plans = micro_batch_plans(dataset, config, plan, ranks.rank, steps=config.max_steps)
    loader = make_loader(MicroBatchSource(dataset, config, plan), config, plans)
    monitor = Monitor(writer.directory, active=ranks.leads)
    interval = Interval()
    for number in range(config.max_steps):
        batches = interval.take(loader, plan.accumulation_steps)
        if config.max_epochs is not None and not any(ranks.sum(sum(batch.real_tokens for batch in batches))):
            break  # the last epoch is over on every rank
        lr = learning_rate(config, number)
        result = step.run(batches, lr)
        done = number + 1
        if done % config.log_interval_steps == 0 or done == config.max_steps:
            row = interval.close(done, result, lr, plan.slot_tokens, ranks)
            writer.step(row)
            monitor.step(row)
            if ranks.leads:
                announce(row, config.max_steps)
    monitor.close()
    if ranks.leads:
        _export(model, resolved, dataset, writer.directory)


class Interval:
    """What happens between two logged steps: time, waiting, tokens."""

    def __init__(self) -> None:
        self._reset()

    def take(self, loader: Iterator[MicroBatch], count: int) -> list[MicroBatch]:
        """The micro-batches of one optimizer step, the wait for them counted."""
        asked_s = time.perf_counter()
        batches = [next(loader) for _ in range(count)]
        self._wait_s += time.perf_counter() - asked_s
        self._real_tokens += sum(batch.real_tokens for batch in batches)
        self._steps += 1
        return batches

    def close(self, done: int, result: StepResult, lr: float, slot_tokens: int, ranks: Ranks) -> StepRow:
        """Sum up over all ranks and begin anew; reading the loss waits for the device.

        Raises:
            TrainingFailed: If the loss is not a number.
        """
        loss, tokens = ranks.sum(float(result.loss_share), self._real_tokens)
        if not math.isfinite(loss):
            raise TrainingFailed(
                f"the loss of step {done} is {loss}",
                next_step="Lower train.learning_rate or raise train.warmup_steps; with bf16, compare one run in fp32.",
            )
        seconds = time.perf_counter() - self._started_s
        row = StepRow(
            step=done,
            loss=loss,
            grad_norm=float(result.grad_norm),
            learning_rate=lr,
            step_s=seconds / self._steps,
            data_wait_s=self._wait_s / self._steps,
            real_tokens=round(tokens / self._steps),
            slot_tokens=slot_tokens,
            real_tokens_per_s=tokens / seconds,
        )
        self._reset()
        return row

    def _reset(self) -> None:
        self._started_s = time.perf_counter()
        self._wait_s = 0.0
        self._real_tokens = 0
        self._steps = 0


def open_dataset(resolved: ResolvedConfig) -> TokenDataset:
    """Open the dataset and hold it against the profile."""
    dataset = TokenDataset.open(resolved.data_dir)
    expected, found = resolved.config.data.dataset_hash, dataset.manifest.dataset_hash
    if expected is not None and expected != found:
        raise BadConfig(
            f"{resolved.data_dir} is not the dataset of the profile: its hash begins {found[:12]}, not {expected[:12]}",
            next_step="Name the right one with --data, or probe again with this one.",
        )
    if not len(dataset):
        raise BadConfig(f"{resolved.data_dir} holds no samples", next_step="Prepare a dataset that does.")
    return dataset


def make_plan(config: TrainConfig, samples: int, world_size: int) -> BatchPlan:
    """Deal the global batch to ranks and micro-batches."""
    return BatchPlan(
        seed=config.seed,
        dataset_samples=samples,
        row_tokens=config.seq_length_tokens,
        layout=config.layout,
        global_batch_rows=config.global_batch_rows,
        accumulation_steps=accumulation_steps(config, world_size),
        world_size=world_size,
        max_epochs=config.max_epochs,
    )


def make_model(config: TrainConfig, dataset: TokenDataset, ranks: Ranks) -> tuple[PreTrainedModel, str]:
    """Build the model on this rank's device, the same weights on every rank."""
    manifest = dataset.manifest
    model_config = build_config(
        config.model,
        vocab_size=manifest.vocab_size,
        special_ids=manifest.special_ids,
        seq_length_tokens=config.seq_length_tokens,
    )
    torch.manual_seed(config.seed)
    model, attention = build_model(model_config, ranks.device)
    # From here on ranks draw different dropout masks.
    torch.manual_seed(config.seed * 1_000_003 + ranks.rank)
    return model, attention


def _header(
    resolved: ResolvedConfig,
    dataset: TokenDataset,
    plan: BatchPlan,
    *,
    model: PreTrainedModel,
    attention: str,
    ranks: Ranks,
) -> RunHeader:
    config = resolved.config
    return RunHeader(
        schema_version=RUN_SCHEMA_VERSION,
        name=config.model.name,
        started_utc=utc_now(),
        config=config.model_dump(mode="json"),
        sources=dict(resolved.sources),
        config_sha256=resolved.config_sha256,
        profile_sha256=resolved.profile_sha256,
        dataset_hash=dataset.manifest.dataset_hash,
        world_size=ranks.world_size,
        accumulation_steps=plan.accumulation_steps,
        rows_per_microbatch_per_rank=plan.rows_per_microbatch_per_rank,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        attention=attention,
        device=torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else "cpu",
        versions={name: importlib.metadata.version(name) for name in ("torch", "transformers", "numpy")}
        | {"python": platform.python_version()},
    )


def _export(model: PreTrainedModel, resolved: ResolvedConfig, dataset: TokenDataset, run_directory: Path) -> None:
    export_model(
        model,
        dataset_dir=resolved.data_dir,
        special_ids=dataset.manifest.special_ids,
        seq_length_tokens=resolved.config.seq_length_tokens,
        directory=run_directory / MODEL_DIRECTORY,
    )
