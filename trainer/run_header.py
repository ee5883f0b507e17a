"""Header of the run record: ``run.json``, written before the first step."""

import importlib.metadata
import os
import platform
from collections.abc import Sequence

from trainer.build import Training
from trainer.checkpoint.job import job_name
from trainer.checkpoint.resume import Start
from trainer.config.resolve import ResolvedConfig
from trainer.data.batch_plan import BatchPlan
from trainer.data.dataset import TokenDataset
from trainer.formats.events import utc_now
from trainer.formats.gpu_peaks import matmul_format, peak_flops_per_s
from trainer.formats.run_record import RUN_SCHEMA_VERSION, RunHeader
from trainer.runtime.ranks import Ranks


def describe_run(
    resolved: ResolvedConfig,
    dataset: TokenDataset,
    plan: BatchPlan,
    training: Training,
    *,
    hosts: Sequence[str],
    driver: str | None,
    gpu_activity_missing: Sequence[str],
    ranks: Ranks,
    start: Start,
) -> RunHeader:
    """Return the content of ``run.json``, in which ``RunWriter`` sets ``attempt``.

    Args:
        resolved: Configuration of the run.
        dataset: Training split.
        plan: Batch split.
        training: Model, as it was built.
        hosts: Host of each rank, by rank.
        driver: Version of the GPU driver; None if unknown.
        gpu_activity_missing: Reasons why rows lack figures of GPU activity.
        ranks: This process's rank and device.
        start: Checkpoint that the run starts from.
    """
    config = resolved.config
    attention = training.module.attention
    versions = {
        name: importlib.metadata.version(name)
        for name in ("torch", "transformers", "numpy")
    }
    return RunHeader(
        layout=plan.layout,
        global_batch_size=plan.global_batch_size,
        gradient_accumulation_steps=plan.gradient_accumulation_steps,
        world_size=plan.world_size,
        schema_version=RUN_SCHEMA_VERSION,
        name=config.model.name,
        job=job_name(os.environ),
        started_utc=utc_now(),
        resumed_from=start.origin,
        resumed_step=0 if start.manifest is None else start.manifest.state.step,
        config=config.model_dump(mode="json"),
        sources=dict(resolved.sources),
        profile_sha256=resolved.profile_sha256,
        profile_modified=resolved.profile_modified,
        dataset_hash=dataset.manifest.dataset_hash,
        parameters=training.work.parameters,
        attention=attention.kind,
        attention_reason=attention.reason,
        recipe_changes=list(training.recipe_changes),
        hosts=list(hosts),
        device=ranks.device_name,
        driver=driver,
        gpu_activity_missing=list(gpu_activity_missing),
        peak_flops_per_s=peak_flops_per_s(
            ranks.device_name, matmul_format(config.precision, tf32=config.tf32)
        ),
        versions=versions | {"python": platform.python_version()},
    )
