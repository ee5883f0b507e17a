"""The rows and the header of a run: where they go, and what the header says of dataset, model and machine."""

import contextlib
import importlib
import importlib.metadata
import platform
from collections.abc import Callable
from typing import Any

import torch

from trainer.build import Training
from trainer.config import TrainConfig
from trainer.dataset import TokenDataset
from trainer.errors import BadConfig
from trainer.events import EventRow, happened, utc_now
from trainer.meter import DeviceFacts
from trainer.parallel import Ranks
from trainer.peaks import peak_flops_per_s, product_format
from trainer.plan import BatchPlan
from trainer.record import RUN_SCHEMA_VERSION, TENSORBOARD_DIRECTORY, EvaluationRow, RunHeader, StepRow
from trainer.resolve import ResolvedConfig
from trainer.resume import Start
from trainer.writer import Row, RunWriter


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


def peak_of(config: TrainConfig, ranks: Ranks) -> float | None:
    """Operations per second that a device is capable of in the format used; None where that is not known."""
    if ranks.device.type != "cuda":
        return None
    number_format = product_format(config.precision, tf32=config.tf32)
    return peak_flops_per_s(torch.cuda.get_device_name(ranks.device), number_format)


def driver_of(ranks: Ranks) -> str | None:
    """Return the version of this rank's GPU driver; None on a CPU, or if NVML does not give it."""
    if ranks.device.type != "cuda":
        return None
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        return str(nvml.nvmlSystemGetDriverVersion())
    except nvml.NVMLError:
        return None


def describe_run(
    resolved: ResolvedConfig,
    dataset: TokenDataset,
    plan: BatchPlan,
    training: Training,
    *,
    facts: DeviceFacts,
    ranks: Ranks,
    start: Start,
    attempt: int,
) -> RunHeader:
    """What ``run.json`` says of a run."""
    config = resolved.config
    return RunHeader(
        schema_version=RUN_SCHEMA_VERSION,
        name=config.model.name,
        attempt=attempt,
        resumed_from=start.origin,
        resumed_step=0 if start.manifest is None else start.manifest.state.step,
        job=start.job,
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
        device=ranks.device_name,
        driver=driver_of(ranks),
        peak_flops_per_s=facts.peak_flops_per_s,
        versions={name: importlib.metadata.version(name) for name in ("torch", "transformers", "numpy")}
        | {"python": platform.python_version()},
        hosts=list(facts.hosts),
    )


Show = Callable[[RunHeader | Row], None]
"""Shows people on rank 0 that the run begins, and each row."""


class Journal:
    """Writes rows everywhere; on other ranks than the first, nowhere."""

    def __init__(self, writer: RunWriter, show: Show, header: RunHeader, *, active: bool) -> None:
        self._writer, self._show, self._active = writer, show, active
        self._board: Any = None
        self._told_trouble: str | None = None
        writer.start(header)
        if not active:
            return
        show(header)
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:  # an extra: the record holds the same numbers
            return
        # What an earlier start drew of steps that are taken again is hidden.
        again = header.resumed_step + 1 if header.attempt > 1 else None
        with contextlib.suppress(OSError):  # the record holds the same numbers
            self._board = SummaryWriter(log_dir=str(writer.directory / TENSORBOARD_DIRECTORY), purge_step=again)

    def _tell_trouble(self, step: int) -> None:
        """Once, when rows begin to wait; they are kept until they can be written."""
        trouble = self._writer.trouble
        if self._active and trouble is not None and trouble != self._told_trouble:
            message = f"cannot write to {self._writer.directory}: {trouble}; rows wait, and training goes on"
            next_step = "Free room, or raise the quota: what waits is then written."
            self._show(happened(step, "record_waits", message, level="error", next_step=next_step))
        self._told_trouble = trouble

    def write(self, row: Row) -> None:
        """Write a row into the record, and show it."""
        self._writer.append(row)
        if isinstance(row, StepRow):
            self._tell_trouble(row.step)
        if not isinstance(row, EventRow):
            self._draw("train" if isinstance(row, StepRow) else "validation", row)
        if self._active:
            self._show(row)

    def close(self) -> None:
        """Flush the files."""
        if self._board is not None:
            with contextlib.suppress(OSError):  # the record has the same numbers
                self._board.close()

    def _draw(self, group: str, row: StepRow | EvaluationRow) -> None:
        if self._board is None:
            return
        try:
            for name, value in row.model_dump(exclude={"step"}).items():
                if value is not None:
                    self._board.add_scalar(f"{group}/{name}", value, row.step)
        except OSError:
            self._board = None  # its file is torn; the record has the same numbers
