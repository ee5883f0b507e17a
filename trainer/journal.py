"""What a run's record says of its dataset, model and machine."""

import contextlib
import importlib
import importlib.metadata
import os
import platform
from collections.abc import Sequence
from typing import Any

from trainer.build import Training
from trainer.config import BatchSplit
from trainer.dataset import TokenDataset
from trainer.errors import BadConfig
from trainer.events import utc_now
from trainer.parallel import Ranks
from trainer.peaks import peak_flops_per_s, product_format
from trainer.plan import BatchPlan
from trainer.record import RUN_SCHEMA_VERSION, TENSORBOARD_DIRECTORY, RunHeader
from trainer.resolve import ResolvedConfig
from trainer.resume import Start, job_name
from trainer.writer import RunWriter


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
    hosts: Sequence[str],
    ranks: Ranks,
    start: Start,
) -> RunHeader:
    """Return what ``run.json`` says of a run, but for the number of the start, which its writer counts."""
    config = resolved.config
    return RunHeader(
        **plan.model_dump(include=set(BatchSplit.model_fields)),
        schema_version=RUN_SCHEMA_VERSION,
        name=config.model.name,
        resumed_from=start.origin,
        resumed_step=0 if start.manifest is None else start.manifest.state.step,
        job=job_name(os.environ),
        started_utc=utc_now(),
        config=config.model_dump(mode="json"),
        sources=dict(resolved.sources),
        profile_sha256=resolved.profile_sha256,
        dataset_hash=dataset.manifest.dataset_hash,
        parameters=training.work.parameters,
        attention=training.module.attention.kind,
        attention_reason=training.module.attention.reason,
        recipe_changes=list(training.recipe_changes),
        device=ranks.device_name,
        driver=driver_of(ranks),
        peak_flops_per_s=peak_flops_per_s(ranks.device_name, product_format(config.precision, tf32=config.tf32)),
        versions={name: importlib.metadata.version(name) for name in ("torch", "transformers", "numpy")}
        | {"python": platform.python_version()},
        hosts=list(hosts),
    )


def open_board(writer: RunWriter, header: RunHeader) -> Any:  # noqa: ANN401 - TensorBoard's own
    """Return a writer for TensorBoard; None without that extra, or on a full disk: the record has the same numbers."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    # What an earlier start drew of steps that are taken again is hidden.
    again = header.resumed_step + 1 if writer.attempt > 1 else None
    with contextlib.suppress(OSError):
        return SummaryWriter(log_dir=str(writer.directory / TENSORBOARD_DIRECTORY), purge_step=again)
