"""Preparation of a run: its checks, and its parts in the order that they need."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformers.utils import logging as transformers_logging

from trainer.build import Training, build_training
from trainer.checkpoint.format import CHECKPOINTS_DIRECTORY
from trainer.checkpoint.manager import CheckpointManager, state_bytes
from trainer.checkpoint.resume import Start
from trainer.checkpoint.stored_checkpoints import list_checkpoints
from trainer.config.compilers import with_compile
from trainer.config.resolve import ResolvedConfig
from trainer.data.batch_plan import make_plan
from trainer.data.dataset import TokenDataset
from trainer.data.global_batch import with_batch_in_sequences
from trainer.data.loader import MicroBatchLoader
from trainer.formats.events import EventRow, new_event
from trainer.formats.gpus import Unavailable
from trainer.formats.nvml import NvmlMonitor
from trainer.formats.run_record import RunHeader
from trainer.formats.slurm_time import slurm_left_s
from trainer.formats.train_config import Logger, TrainConfig
from trainer.health.controller import HealthController
from trainer.health.time_budget import TimeBudget
from trainer.health.watchdog import Watchdog
from trainer.preflight.dataset_checks import check_data, open_dataset
from trainer.preflight.directory_checks import check_directory
from trainer.preflight.rank_checks import check_ranks, gather_facts
from trainer.preflight.ranks_text import ranks_text
from trainer.preflight.start_warning import start_warning
from trainer.record.boards import open_boards
from trainer.record.gpu_reader import GpuReader, open_gpu_reader
from trainer.record.meter import Meter
from trainer.record.start_clock import StartClock
from trainer.record.writer import RunWriter, Show
from trainer.run_header import describe_run
from trainer.runtime.ranks import Ranks, warm_up_libraries


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRun:
    """Parts of a run on one rank, ready for its first step."""

    resolved: ResolvedConfig
    config: TrainConfig
    """Configuration of ``resolved`` with its global batch in sequences, even if you
    gave it in tokens or samples."""
    dataset: TokenDataset
    """Training split."""
    validation: TokenDataset
    """Validation split; it may be empty."""
    training: Training
    meter: Meter
    gpu_reader: GpuReader
    """Reader of the GPUs of this node, not started yet."""
    checkpoints: CheckpointManager
    loader: MicroBatchLoader
    controller: HealthController
    budget: TimeBudget
    """Time limit of the run; only rank 0's counts the time limit of a SLURM job."""


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

    The arguments and errors are those of ``trainer.loop.train``. All ranks call this
    function.
    """
    transformers_logging.disable_progress_bar()  # the run has its own progress bar
    resolved, why_not_compiled = with_compile(resolved)
    dataset = open_dataset(resolved)

    # Ranks are compared before anything that could fail or hang if they differ.
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
    warm_up_libraries(ranks)  # before the model takes memory
    training = build_training(
        config, dataset.manifest.vocab_size, dataset.manifest.special_ids, ranks
    )
    events += _check_weight_copies(training, config)
    events += _check_run_directory(writer, config, training, ranks)

    monitor = _open_monitor(ranks)
    gpu_uuids = [facts.gpu_uuid for facts in facts_by_rank]
    gpu_reader = open_gpu_reader(ranks, gpu_uuids, monitor, environment)
    header = describe_run(
        resolved,
        dataset,
        plan,
        training,
        hosts=hosts,
        driver=_driver_version(monitor),
        gpu_activity_missing=_missing_on_any_node(gpu_reader, ranks),
        ranks=ranks,
        start=start,
    )
    _open_record(writer, header, events, show, config.log_to if ranks.leads else ())
    return PreparedRun(
        resolved=resolved,
        config=config,
        dataset=dataset,
        validation=validation,
        training=training,
        meter=Meter(
            training.work,
            ranks,
            gpu_reader,
            peak_flops_per_s=header.peak_flops_per_s,
            hosts=hosts,
        ),
        gpu_reader=gpu_reader,
        checkpoints=CheckpointManager(
            writer.directory,
            config,
            training,
            ranks,
            attempt=writer.attempt,
            report_event=writer.append,
            progressed=watchdog.heartbeat,
        ),
        loader=MicroBatchLoader(dataset, config, plan, ranks),
        controller=HealthController(config, ranks, writer.append),
        budget=TimeBudget(
            config.stop_after_s,
            clock.monotonic_start_s,
            slurm_left_s(environment) if ranks.leads else None,
        ),
    )


def _open_monitor(ranks: Ranks) -> NvmlMonitor | None:
    """Return the monitor of this node's GPUs on its first rank; None on a CPU."""
    if ranks.device.type != "cuda" or ranks.local_rank != 0:
        return None
    return NvmlMonitor()


def _driver_version(monitor: NvmlMonitor | None) -> str | None:
    """Return the version of the GPU driver; None if it is unknown."""
    version = None if monitor is None else monitor.driver_version()
    return None if isinstance(version, Unavailable) else version


def _missing_on_any_node(gpu_reader: GpuReader, ranks: Ranks) -> list[str]:
    """Return the reasons why the readers of all nodes lack figures.

    A reason that does not hold on every node comes with the first ranks of its nodes.
    All ranks call this function.
    """
    reasons_by_rank = ranks.all_gather_object(
        gpu_reader.missing if gpu_reader.reports else None
    )
    readers = 0
    ranks_by_reason: dict[str, list[int]] = {}
    for rank, reasons in enumerate(reasons_by_rank):
        readers += reasons is not None
        for reason in reasons or ():
            ranks_by_reason.setdefault(reason, []).append(rank)
    return [
        reason
        if len(those) == readers
        else f"{reason} (on the nodes of {ranks_text(those)})"
        for reason, those in ranks_by_reason.items()
    ]


def _open_record(
    writer: RunWriter,
    header: RunHeader,
    events: Sequence[EventRow],
    show: Show,
    log_to: Sequence[Logger] | None,
) -> None:
    """Write the header of the run record, open its boards, and record the events.

    ``log_to`` names the loggers; None is the default of ``open_boards``.
    """
    board_failures: list[EventRow] = []
    boards = open_boards(
        log_to, writer.directory, header, writer.attempt, board_failures.append
    )
    writer.start(header, show, boards)
    for event in (*events, *board_failures):
        writer.append(event)


def _not_compiled(reason: str) -> EventRow:
    """Return a warning that layers are not compiled, as something is not installed."""
    return start_warning(
        reason, "Install it, or accept this with --set train.compile=false"
    )


def _check_weight_copies(training: Training, config: TrainConfig) -> list[EventRow]:
    """Return an event if weights are cast to bf16 again in every micro-batch."""
    reason = training.module.no_copies_reason
    if reason is None:
        return []
    model_type = config.model.config["model_type"]
    message = (
        f"weights of {model_type!r} are cast to bf16 in every micro-batch: {reason}"
    )
    return [new_event(0, "preflight", message, level="info")]


def _check_run_directory(
    writer: RunWriter, config: TrainConfig, training: Training, ranks: Ranks
) -> list[EventRow]:
    """Return warnings about the directory of the checkpoints; none without them.

    Raises:
        BadConfig: If the directory cannot keep the checkpoints.
    """
    if not config.checkpoint.enabled:
        return []
    existing_checkpoints = 0
    if ranks.leads:
        directory = writer.directory / CHECKPOINTS_DIRECTORY
        existing_checkpoints = len(list_checkpoints(directory))
    return check_directory(
        writer, config, state_bytes(training), existing_checkpoints, ranks
    )
