"""The training loop, readable top to bottom."""

import importlib.metadata
import platform

import torch
from transformers.utils import logging as transformers_logging

from trainer.batch import in_rows, make_plan
from trainer.build import Training, build_training
from trainer.checkpoint import export_model
from trainer.config import ResolvedConfig, TrainConfig
from trainer.dataset import TokenDataset
from trainer.errors import BadConfig
from trainer.evaluate import evaluate
from trainer.feed import MicroBatchSource, make_loader, micro_batch_plans
from trainer.journal import Journal, Screen
from trainer.meter import DeviceFacts, Meter
from trainer.parallel import Ranks
from trainer.peaks import Format, peak_flops_per_s
from trainer.plan import BatchPlan
from trainer.recompute import GraphCounter
from trainer.record import MODEL_DIRECTORY, RUN_SCHEMA_VERSION, RunHeader, RunWriter, utc_now
from trainer.schedule import learning_rate


def train(resolved: ResolvedConfig, ranks: Ranks, writer: RunWriter, screen: Screen) -> None:
    """Train to the end, evaluate, and save the model.

    Raises:
        BadConfig: If dataset or model do not fit the configuration.
        TrainingFailed: If loss or gradient are not numbers.
    """
    transformers_logging.disable_progress_bar()  # the run has a bar of its own
    dataset = open_dataset(resolved)
    validation = TokenDataset(dataset.directory, dataset.manifest, "validation")
    config = in_rows(resolved.config, dataset)
    plan = make_plan(config, len(dataset), ranks.world_size)
    training = build_training(config, dataset.manifest.vocab_size, dataset.manifest.special_ids, ranks)
    facts = DeviceFacts(work=training.work, peak_flops_per_s=_peak_flops_per_s(config, ranks))
    header = _header(resolved, dataset, plan, training, facts=facts, ranks=ranks)
    journal = Journal(writer, screen, header, active=ranks.leads)

    plans = micro_batch_plans(dataset, config, plan, ranks.rank)
    loader = make_loader(MicroBatchSource(dataset, config, plan), config, plans)
    meter, graphs = Meter(facts, ranks), GraphCounter()
    done = empty_rows = 0
    while done < config.max_steps:
        batches = meter.take(loader, plan.accumulation_steps)
        if config.max_epochs is not None and not any(ranks.sum(sum(batch.real_tokens for batch in batches))):
            # Lanes take turns and end one by one: only as many empty rows as there are lanes say that all have ended.
            empty_rows += config.global_batch_rows
            if empty_rows >= plan.lanes:
                break
            continue
        empty_rows = 0
        lr = learning_rate(config, done)
        done += 1
        evaluation_due = bool(len(validation)) and _due(done, config.evaluation.interval_steps)
        row_due = _due(done, config.log_interval_steps) or done == config.max_steps or evaluation_due
        meter.add(batches, training.step.run(batches, lr, part_of_it=row_due))
        graphs.stepped()
        if row_due:
            overflows = training.module.overflows
            meter.close(done, lr, head_overflows=overflows, recompilations=graphs.recompilations)
        journal.steps(meter.rows())
        if evaluation_due and done < config.max_steps:
            with graphs.elsewhere():
                journal.evaluation(evaluate(training.module, validation, config, ranks, done))
            meter.restart()
    if meter.open_steps:  # the data ended between two logged steps
        meter.close(done, lr, head_overflows=training.module.overflows, recompilations=graphs.recompilations)
    journal.steps(meter.rows(all_of_them=True))
    if len(validation):
        journal.evaluation(evaluate(training.module, validation, config, ranks, done))
    journal.close()
    export_model(
        training.module,
        dataset_dir=resolved.data_dir,
        special_ids=dataset.manifest.special_ids,
        seq_length_tokens=config.seq_length_tokens,
        directory=writer.directory / MODEL_DIRECTORY,
        leads=ranks.leads,
    )


def _due(done: int, interval_steps: int | None) -> bool:
    return interval_steps is not None and done % interval_steps == 0


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


def _peak_flops_per_s(config: TrainConfig, ranks: Ranks) -> float | None:
    if ranks.device.type != "cuda":
        return None
    number_format: Format = "bf16" if config.precision == "bf16" else "tf32" if config.tf32 else "fp32"
    return peak_flops_per_s(torch.cuda.get_device_name(ranks.device), number_format)


def _header(
    resolved: ResolvedConfig,
    dataset: TokenDataset,
    plan: BatchPlan,
    training: Training,
    *,
    facts: DeviceFacts,
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
        global_batch_rows=plan.global_batch_rows,
        parameters=facts.work.parameters,
        layout=plan.layout,
        attention=training.module.attention.kind,
        attention_reason=training.module.attention.reason,
        recipe_changes=list(training.recipe_changes),
        device=torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else "cpu",
        peak_flops_per_s=facts.peak_flops_per_s,
        versions={name: importlib.metadata.version(name) for name in ("torch", "transformers", "numpy")}
        | {"python": platform.python_version()},
    )
