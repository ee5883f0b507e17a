"""Preparation of a run: its checks, and its parts in the order that they need."""

from collections.abc import Mapping
from dataclasses import dataclass

from transformers.utils import logging as transformers_logging

from trainer.build import Training, build_training
from trainer.checkpoint.format import CHECKPOINTS_DIRECTORY, list_checkpoints
from trainer.checkpoint.manager import CheckpointManager, state_bytes
from trainer.checkpoint.resume import Start
from trainer.config.resolve import ResolvedConfig, with_compile
from trainer.config.train_config import TrainConfig
from trainer.data.dataset import TokenDataset
from trainer.data.global_batch import make_plan, with_batch_in_sequences
from trainer.data.loader import MicroBatchLoader
from trainer.distributed.ranks import Ranks, open_libraries
from trainer.health.controller import HealthController
from trainer.health.events import EventRow, new_event
from trainer.health.time_budget import TimeBudget, slurm_left_s
from trainer.health.watchdog import Watchdog
from trainer.preflight.dataset_checks import check_data, open_dataset
from trainer.preflight.directory_checks import check_directory
from trainer.preflight.rank_checks import check_ranks, gather_facts
from trainer.preflight.start_warning import start_warning
from trainer.record.boards import open_boards
from trainer.record.meter import Meter
from trainer.record.start_clock import StartClock
from trainer.record.writer import RunWriter, Show
from trainer.run_header import describe_run


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRun:
    """Parts of a run on one rank, ready for its first step."""

    resolved: ResolvedConfig
    config: TrainConfig
    """Configuration whose global batch is in sequences."""
    dataset: TokenDataset
    validation: TokenDataset
    training: Training
    meter: Meter
    checkpoints: CheckpointManager
    loader: MicroBatchLoader
    controller: HealthController
    budget: TimeBudget


def prepare_run(
    resolved: ResolvedConfig,
    ranks: Ranks,
    writer: RunWriter,
    show: Show,
    *,
    start: Start,
    watchdog: Watchdog,
    clock: StartClock,
    environment: Mapping[str, str],
) -> PreparedRun:
    """Check that the run can start, open its record, and build its parts.

    The arguments and errors are those of ``trainer.loop.train``.
    """
    transformers_logging.disable_progress_bar()  # the run has its own progress bar
    resolved, why_not_compiled = with_compile(resolved)
    dataset = open_dataset(resolved)

    # Ranks are compared first: if they differ, what follows could fail or hang on some.
    facts_by_rank = gather_facts(resolved, dataset.manifest.dataset_hash, ranks)
    hosts = tuple(facts.host for facts in facts_by_rank)
    # Events wait in this list until the run record is open.
    events = [*start.events]
    events += check_ranks(facts_by_rank, resolved.fingerprint)
    events += check_data(resolved.config, dataset.manifest, dataset.directory)
    if why_not_compiled is not None:
        events.append(_not_compiled(why_not_compiled))
    validation = TokenDataset(dataset.directory, dataset.manifest, "validation")
    config = with_batch_in_sequences(resolved.config, dataset)
    plan = make_plan(config, len(dataset), ranks.world_size)

    open_libraries(ranks)  # before the model takes memory
    training = build_training(
        config, dataset.manifest.vocab_size, dataset.manifest.special_ids, ranks
    )
    events += _check_weight_copies(training, config)
    events += _check_run_directory(writer, config, training, ranks)

    header = describe_run(
        resolved, dataset, plan, training, hosts=hosts, ranks=ranks, start=start
    )
    meter = Meter(
        training.work, ranks, peak_flops_per_s=header.peak_flops_per_s, hosts=hosts
    )
    loggers = config.log_to if ranks.leads else ()
    boards = open_boards(
        loggers, writer.directory, header, writer.attempt, events.append
    )
    writer.start(header, show, boards)

    checkpoints = CheckpointManager(
        writer.directory,
        config,
        training,
        ranks,
        attempt=writer.attempt,
        report_event=writer.append,
        progressed=watchdog.heartbeat,
    )
    loader = MicroBatchLoader(dataset, config, plan, ranks)
    controller = HealthController(config, ranks, writer.append)
    for event in events:
        writer.append(event)
    return PreparedRun(
        resolved=resolved,
        config=config,
        dataset=dataset,
        validation=validation,
        training=training,
        meter=meter,
        checkpoints=checkpoints,
        loader=loader,
        controller=controller,
        budget=TimeBudget(
            config.stop_after_s,
            clock.monotonic_start_s,
            slurm_left_s(environment) if ranks.leads else None,
        ),
    )


def _not_compiled(why: str) -> EventRow:
    """Return a warning that layers are not compiled."""
    return start_warning(
        why, "Install it, or accept this with --set train.compile=false"
    )


def _check_weight_copies(training: Training, config: TrainConfig) -> list[EventRow]:
    """Return an event if weights are cast to bf16 again in every micro-batch."""
    why = training.module.no_copies_reason
    if why is None:
        return []
    model_type = config.model.config["model_type"]
    message = f"weights of {model_type!r} are cast to bf16 in every micro-batch: {why}"
    return [new_event(0, "preflight", message, level="info")]


def _check_run_directory(
    writer: RunWriter, config: TrainConfig, training: Training, ranks: Ranks
) -> list[EventRow]:
    """Return warnings about the directory that will keep the checkpoints."""
    if not config.checkpoint.enabled:
        return []
    existing_checkpoints = 0
    if ranks.leads:
        directory = writer.directory / CHECKPOINTS_DIRECTORY
        existing_checkpoints = len(list_checkpoints(directory))
    return check_directory(
        writer, config, state_bytes(training), existing_checkpoints, ranks
    )
