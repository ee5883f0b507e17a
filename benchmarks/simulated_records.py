"""What a simulated training leaves behind: a run's record, and the profile that its tuning would have written."""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from autotune.core.evidence import CurvePoint, Evidence, GpuUse, ProbeEvidence, WorkersEvidence, WorkersRow
from autotune.core.profile import Constraints, Fingerprint, Profile, Provenance
from benchmarks.simulated_training import Step, World, dealt, fill, memory_bytes, memory_terms, most_rows, step
from trainer.config import TrainConfig
from trainer.record import Run, RunHeader, StepRow

NOISE_SHARE = 0.02
"""Of every time that is read."""


def run_of(
    world: World,
    train: TrainConfig,
    *,
    seed: int = 0,
    steps: int = 40,
    noise_scale: float | None = None,
    first_step: int = 1,
) -> Run:
    """A run's record, as the trainer writes it."""
    draw, true = random.Random(seed), step(world, train)
    peak = world.peaks_flops_per_s["bf16"] if world.gpu_name else None
    rows = []
    for number in range(first_step, first_step + steps):
        times = {
            name: getattr(true, name) * math.exp(draw.gauss(0, NOISE_SHARE))
            for name in (
                "compute_s",
                "straggling_s",
                "data_wait_s",
                "starving_s",
                "network_s",
                "update_s",
                "between_s",
            )
        }
        told = None if noise_scale is None else noise_scale * draw.uniform(0.8, 1.25)
        rows.append(_row(number, times, true, world, noise_scale=told))
    header = RunHeader(
        schema_version=3, name="simulated", attempt=1, resumed_from=None, resumed_step=0, job="", started_utc="",
        config=train.model_dump(mode="json"), sources={}, config_sha256="", profile_sha256="", dataset_hash="d",
        world_size=world.ranks, accumulation_steps=dealt(world, train)[0],
        rows_per_microbatch_per_rank=dealt(world, train)[1],
        global_batch_rows=train.global_batch_rows, parameters=world.parameters, layout=train.layout, attention="sdpa",
        attention_reason="", recipe_changes=[], device=world.gpu_name or "cpu", peak_flops_per_s=peak, versions={},
    )  # fmt: skip
    return Run(
        directory=Path("runs/simulated"), header=header, steps=tuple(rows), evaluations=(), events=(), startup=None,
        end=None,
    )  # fmt: skip


def _row(number: int, times: dict[str, float], true: Step, world: World, *, noise_scale: float | None) -> StepRow:
    step_s = sum(times.values())
    real, slots, ranks = true.real_tokens, true.slot_tokens, world.ranks
    flops = 6.0 * world.parameters * real / step_s / ranks
    peak = world.peaks_flops_per_s["bf16"] if world.gpu_name else None
    return StepRow(
        step=number, loss=5.0, grad_norm=1.0, learning_rate=1e-4, step_s=step_s, data_wait_s=times["data_wait_s"],
        compute_s=times["compute_s"],
        communication_s=times["network_s"] + times["straggling_s"] + times["starving_s"],
        optimizer_s=times["update_s"], real_tokens=round(real), slot_tokens=round(slots),
        packing_efficiency=real / slots,
        real_tokens_per_s=real / step_s, real_tokens_per_s_per_rank=real / step_s / ranks,
        slot_tokens_per_s=slots / step_s, slot_tokens_per_s_per_rank=slots / step_s / ranks,
        model_flops_per_s_per_rank=flops, mfu=None if peak is None else flops / peak,
        mfu_6n=None if peak is None else flops / peak, peak_memory_bytes=2**34, gradient_noise_scale_tokens=noise_scale,
        head_overflows=0, recompilations=0, skipped_steps=0, slowest_rank=1 if ranks > 1 else None,
        slowest_rank_ratio=1 + times["straggling_s"] / times["compute_s"] if ranks > 1 else None,
        longest_data_wait_s=times["data_wait_s"] + times["starving_s"] if ranks > 1 else None,
        longest_data_wait_rank=1 if ranks > 1 else None,
    )  # fmt: skip


def profile_of(
    world: World, train: TrainConfig, *, seed: int = 0, counts: tuple[int, ...] = (0, 1, 2, 4, 8)
) -> Profile:
    """What tuning would have written: a curve, a sweep of loader workers, and the GPU's counters."""
    draw = random.Random(seed)

    def noisy() -> float:
        return math.exp(draw.gauss(0, NOISE_SHARE / 2))

    most = most_rows(world, train)
    sizes = [rows for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if rows <= most]
    sizes += [most] if most not in sizes else []
    alone = replace(world, nodes=1, ranks_per_node=1, load_s_per_row=0.0)
    curve = []
    for rows in sizes:
        one = step(alone, train.model_copy(update={"micro_batch_rows": rows, "global_batch_rows": rows}))
        speed = one.slot_tokens / one.step_s * noisy()
        curve.append(
            CurvePoint(
                rows=rows, slot_tokens_per_s=speed, step_s=one.slot_tokens / speed, timed_steps=8,
                slot_tokens_per_s_low=speed * 0.985, slot_tokens_per_s_high=speed * 1.015,
            )
        )  # fmt: skip
    probe = ProbeEvidence(
        feasible_max=most, infeasible_min=most + 1, feasible_peak_bytes=int(memory_bytes(world, train, most)),
        search_trials=2,
        seconds=60.0, mean_real_tokens_per_row=fill(world, train) * world.seq_length, curve=curve,
        parameters=world.parameters, traced_terms_bytes=memory_terms(world, train, most), choice="",
        local_ranks=world.ranks_per_node,
    )  # fmt: skip
    return Profile(
        train=train,
        constraints=Constraints(
            memory_budget_bytes=world.memory_bytes, headroom_share=0.03,
            global_batch_tokens=round(train.global_batch_rows * world.seq_length * fill(world, train)),
        ),
        fingerprint=Fingerprint(
            device=train.device, gpu_name=world.gpu_name, gpu_count=world.ranks_per_node if world.gpu_name else 0,
            gpu_total_bytes=world.memory_bytes, torch="2.13.0", transformers="5", python="3.12", allotted_cpus=16,
            ram_total_bytes=2**40, data_filesystem="ext4" if world.staged else "lustre", model_sha256="m",
            dataset_hash="d",
        ),
        provenance=Provenance(
            tool_version="0", created_utc="2026-01-01T00:00:00Z", commands=["probe", "workers"], ledger_sha256="l"
        ),
        evidence=Evidence(probe=probe, workers=_sweep(world, train, counts, noisy)),
    )  # fmt: skip


def _sweep(world: World, train: TrainConfig, counts: tuple[int, ...], noisy: Callable[[], float]) -> WorkersEvidence:
    alone = replace(world, nodes=1, ranks_per_node=1)
    few = train.model_copy(update={"global_batch_rows": 4 * train.micro_batch_rows})
    ceiling = step(replace(alone, load_s_per_row=0.0, storage_rows_per_s=math.inf), few)
    rows, chosen = [], None
    for count in counts:
        one = step(alone, few.model_copy(update={"data": few.data.model_copy(update={"loader_workers": count})}))
        ratio = ceiling.step_s / one.step_s * noisy()
        enough = ratio >= 0.98
        if enough and chosen is None:
            chosen = count
        rows.append(
            WorkersRow(
                loader_workers=count, slot_tokens_per_s=[one.slot_tokens / one.step_s * noisy() for _ in range(4)],
                ratio_to_ceiling=ratio, ratio_low=ratio * 0.985, ratio_high=ratio * 1.015,
                verdict="proven" if enough else "refuted", data_wait_share=one.data_wait_s / one.step_s,
                memory_bytes=2**30 + count * 2**29, storage_bytes_per_s=2e8 if not world.staged else 0.0,
                gpu=GpuUse(
                    # Over the whole window, in which nothing is busy while data is waited for.
                    utilisation_share=0.98, gpm_sm_share=one.busy_share * (1 - one.data_wait_s / one.step_s),
                    gpm_tensor_share=one.tensor_share * (1 - one.data_wait_s / one.step_s),
                    gpm_dram_share=one.memory_share * (1 - one.data_wait_s / one.step_s),
                ) if world.gpu_name else None,
            )
        )  # fmt: skip
    return WorkersEvidence(
        chosen=counts[-1] if chosen is None else chosen, choice="", fed=chosen is not None,
        ceiling_slot_tokens_per_s=[ceiling.slot_tokens / ceiling.step_s], rows=rows, local_ranks=world.ranks_per_node,
        max_workers=counts[-1], max_workers_because="", consumer="the training step", window_s=2.0, windows=20,
        seconds=60.0, data_filesystem="ext4" if world.staged else "lustre",
        data_on_network=not world.staged, gpu_source="simulated",
    )  # fmt: skip
