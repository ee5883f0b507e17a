"""Records of simulated trainings and tunings, in the types of real ones."""

from collections.abc import Sequence
from pathlib import Path

from autotune.evidence.network import NetworkEvidence
from autotune.evidence.probe import ProbeEvidence
from autotune.evidence.profile import (
    Constraints,
    Evidence,
    Fingerprint,
    Profile,
    Provenance,
    trainer_subject,
)
from autotune.evidence.workers import WorkersEvidence, WorkersRow
from testbed.examples.checkpoints import header_of
from testbed.examples.run_rows import row_of
from trainer.formats.run_record import Run, StepRow
from trainer.formats.train_config import TrainConfig


def run_of_rows(
    train: TrainConfig,
    rows: Sequence[StepRow],
    *,
    ranks: int,
    gradient_accumulation_steps: int,
    parameters: int,
    device: str,
    peak: float | None,
) -> Run:
    """Return a run with these logged steps.

    Args:
        train: Its settings.
        rows: Steps of the record.
        ranks: Number of all ranks.
        gradient_accumulation_steps: Micro-batches of a rank's step.
        parameters: Number of the model's parameters.
        device: Name of the GPU, or ``cpu``.
        peak: Peak FLOP/s of a GPU.
    """
    header = header_of(
        train,
        name="simulated",
        world_size=ranks,
        gradient_accumulation_steps=gradient_accumulation_steps,
        global_batch_size=train.global_batch_size,
        parameters=parameters,
        layout=train.layout,
        device=device,
        peak_flops_per_s=peak,
    )
    return Run(
        directory=Path("runs/simulated"),
        header=header,
        steps=tuple(rows),
        evaluations=(),
        events=(),
        startup=None,
        end=None,
    )


def step_row(
    step: int,
    tokens: tuple[float, float],
    *,
    step_s: float,
    ranks: int,
    parameters: int,
    peak: float | None,
    **figures: float | int | None,
) -> StepRow:
    """Return a logged step of this many non-padding and padded tokens.

    Its rates follow from its seconds.
    """
    real, slots = tokens
    flops = 6.0 * parameters * real / step_s / ranks
    mfu = None if peak is None else flops / peak
    return row_of(
        step,
        step_s=step_s,
        non_padding_tokens=round(real),
        padded_tokens=round(slots),
        packing_efficiency=real / slots,
        tokens_per_s=real / step_s,
        tokens_per_s_per_rank=real / step_s / ranks,
        padded_tokens_per_s=slots / step_s,
        padded_tokens_per_s_per_rank=slots / step_s / ranks,
        model_flops_per_s_per_rank=flops,
        mfu=mfu,
        mfu_6n=mfu,
        **figures,
    )


def profile_with(
    train: TrainConfig,
    probe: ProbeEvidence,
    workers: WorkersEvidence,
    network: NetworkEvidence | None = None,
    *,
    gpu_name: str | None,
    memory_bytes: int,
    filesystem: str = "ext4",
) -> Profile:
    """Return what tuning would have written."""
    return Profile(
        subject=trainer_subject(train),
        train=train,
        constraints=Constraints(
            memory_budget_bytes=memory_bytes,
            headroom_share=0.03,
            global_batch_tokens=round(
                train.global_batch_size * probe.tokens_per_sequence
            ),
        ),
        fingerprint=Fingerprint(
            device=train.device,
            gpu_name=gpu_name,
            gpu_count=probe.local_ranks if gpu_name else 0,
            gpu_total_bytes=memory_bytes,
            torch="2.13.0",
            transformers="5",
            python="3.12",
            allotted_cpus=16,
            ram_total_bytes=2**40,
            data_filesystem=filesystem,
            model_sha256="m",
            dataset_hash="d",
        ),
        provenance=Provenance(
            tool_version="0",
            created_utc="2026-01-01T00:00:00Z",
            commands=["probe", "workers"],
            trial_log_sha256="l",
        ),
        evidence=Evidence(probe=probe, workers=workers, network=network),
    )


def sweep_with(
    rows: list[WorkersRow],
    ceiling: list[float],
    chosen: int | None,
    *,
    local_ranks: int,
    filesystem: str = "ext4",
) -> WorkersEvidence:
    """Return a sweep of worker counts.

    Without a chosen count, it is the last one, which does not keep up with the step.
    """
    return WorkersEvidence(
        chosen=rows[-1].num_workers if chosen is None else chosen,
        choice="",
        keeps_up=chosen is not None,
        unit="tokens",
        counts_padding=True,
        cached_units_per_s=ceiling,
        rows=rows,
        local_ranks=local_ranks,
        max_workers=8,
        max_workers_because="",
        consumer="the training step",
        window_s=2.0,
        windows=20,
        seconds=60.0,
        data_filesystem=filesystem,
        data_on_network=filesystem == "lustre",
        gpu_source="simulated",
    )
