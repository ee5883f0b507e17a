"""Trainings by arithmetic, for tests of single rules.

In them, advice can be followed and its gain be measured. They are other models of a
training than the rules that they judge, if kin to them: in both a step adds up. A
device multiplies and moves bytes, kernel after kernel, as fast as its data sheet and an
efficiency allow; the program launches kernels; a loader makes sequences; a ring carries
gradients, which the backward of the last micro-batch hides; the optimizer updates its
state. A record or a measurement has that, times noise.
"""

import math
import random
from dataclasses import dataclass, field, replace

from autotune.advice.decide.apply import apply_changes
from autotune.evidence.advice import SettingChange
from autotune.evidence.gpu_use import GpuUse
from autotune.evidence.probe import CurvePoint, ProbeEvidence
from autotune.evidence.profile import Profile
from autotune.evidence.workers import WorkersEvidence, WorkersRow
from autotune.profiles.decide.batch_split import split_global_batch
from testbed.simulators.records import profile_with, run_of_rows, step_row, sweep_with
from trainer.formats.run_record import Run
from trainer.formats.train_config import DataSettings, ModelSettings, TrainConfig

PEAKS_FLOPS_PER_S = {"bf16": 835e12, "tf32": 417e12, "fp32": 60e12}
VOCAB_SIZE = 16_384
FILL = {"packed": 0.995, "bucketed": 0.9}
BYTES_PER_ELEMENT_AND_LAYER = {"fp32": 190.0, "tf32": 190.0, "bf16": 110.0}
"""Moved by one layer outside of its products, forward and backward, for each element of
its hidden state."""
FUSED_SHARE = {"memory": 0.5, "launches": 0.3}
"""Share of memory traffic and of launches that remains after compiling."""
KERNELS_PER_LAYER = 75
BYTES_PER_LOGIT = 14.0
SDPA_OVER_VARLEN = 1.6
"""Time of attention with a mask, divided by attention without, for the same matmuls."""
NOISE_SHARE = 0.02
"""Of every time that is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A model, a dataset and a machine."""

    gpu_name: str | None = "NVIDIA H100 NVL"
    reached: dict[str, float] = field(
        default_factory=lambda: {"bf16": 0.55, "tf32": 0.66, "fp32": 0.85}
    )
    """Of the peaks, by products of a model's size."""
    memory_bytes_per_s: float = 3.9e12 * 0.8
    memory_bytes: int = 94 * 10**9
    launch_s: float = 5e-6
    between_s: float = 0.0
    """Spent between steps, if every step is logged."""
    layers: int = 12
    hidden: int = 768
    seq_length: int = 512
    mean_document_tokens: float = 190.0
    load_s_per_row: float = 5e-5
    """Of one worker, or of the trainer itself without any; of a sequence that is
    full."""
    storage_rows_per_s: float = math.inf
    """Of a shared file system; without end if data is staged."""
    nodes: int = 1
    ranks_per_node: int = 1
    node_bytes_per_s: float = 2.5e9
    slow_rank: float = 1.0
    """How many times as long the second rank computes."""
    slow_loader: float = 1.0
    """How many times as long its loader takes for a sequence."""
    uneven_rows: float = 0.0
    """How much longer the rank with the longest sequences computes in a step, if they
    are as wide as their content."""

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def parameters(self) -> int:
        return self.layers * 12 * self.hidden**2 + self.hidden * (
            VOCAB_SIZE + self.seq_length + self.hidden
        )

    @property
    def filesystem(self) -> str:
        return "ext4" if math.isinf(self.storage_rows_per_s) else "lustre"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Parts of a step's time on a rank that is not slow, with its counters."""

    seconds: dict[str, float]
    busy_share: float
    tensor_share: float
    memory_share: float
    non_padding_tokens: float
    padded_tokens: float

    @property
    def step_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def tokens_per_s(self) -> float:
        return self.non_padding_tokens / self.step_s


def settings(world: World, **changes: object) -> TrainConfig:
    """Return a good configuration in a world, with these differences."""
    config = {
        "model_type": "bert",
        "hidden_size": world.hidden,
        "num_hidden_layers": world.layers,
        "attention_probs_dropout_prob": 0.0,
    }
    base = TrainConfig(
        model=ModelSettings(name="simulated", config=config),
        seq_length_tokens=world.seq_length,
        layout="packed",
        micro_batch_size=64,
        global_batch_size=64 * world.ranks,
        precision="bf16" if world.gpu_name else "fp32",
        device="cuda" if world.gpu_name else "cpu",
        data=DataSettings(num_workers=2),
        log_interval_steps=1,
        compile=False,
    )
    return settings_with(base, **changes)


def settings_with(train: TrainConfig, **changes: object) -> TrainConfig:
    """Return settings with differences; a double underscore stands for a dot."""
    wishes = [
        SettingChange(key=key.replace("__", "."), old=None, new=value)
        for key, value in changes.items()
    ]
    return apply_changes(train, wishes)


def step(world: World, train: TrainConfig) -> Step:
    split = split_global_batch(
        train.global_batch_size, train.micro_batch_size, world.ranks
    )
    micro_batches, rows = split.gradient_accumulation_steps, split.micro_batch_size
    products_s, moving_s = _device(world, train, rows)
    launches_s = world.launch_s * KERNELS_PER_LAYER * world.layers
    launches_s *= FUSED_SHARE["launches"] if train.compile else 1
    device_s = products_s + moving_s
    micro_s = max(device_s, launches_s)
    wait_s = _wait(world, train, rows, micro_s)
    late = replace(world, load_s_per_row=world.load_s_per_row * world.slow_loader)
    state_bytes = (
        28
        * world.parameters
        / (world.ranks if train.parallel.strategy == "zero1" else 1)
    )
    compute_s = micro_batches * micro_s
    slower = (
        world.slow_rank - 1 + (world.uneven_rows if train.layout == "bucketed" else 0.0)
    )
    alone = world.ranks == 1
    return Step(
        seconds={
            "computing": compute_s,
            "straggling": 0.0 if alone else slower * compute_s,
            "waiting": micro_batches * wait_s,
            # How much longer the second rank waits for its loader, and all others for
            # it.
            "starving": (
                0.0
                if alone
                else micro_batches * (_wait(late, train, rows, micro_s) - wait_s)
            ),
            "network": _exposed(world, train, micro_s),
            "optimizer step": state_bytes / world.memory_bytes_per_s,
            "between": world.between_s / train.logged_steps,
        },
        busy_share=min(1.0, device_s / micro_s),
        tensor_share=world.reached["bf16" if train.precision == "bf16" else "tf32"]
        * products_s
        / micro_s,
        memory_share=min(1.0, moving_s / micro_s + 0.3 * products_s / micro_s),
        non_padding_tokens=train.global_batch_size
        * world.seq_length
        * fill(world, train),
        padded_tokens=micro_batches * rows * world.ranks * world.seq_length,
    )


def fill(world: World, train: TrainConfig) -> float:
    """Return the share of non-padding tokens in positions, on average."""
    return FILL.get(
        train.layout, min(1.0, world.mean_document_tokens / world.seq_length)
    )


def _device(world: World, train: TrainConfig, rows: int) -> tuple[float, float]:
    """Return seconds of matmuls, and of moving bytes, of one micro-batch.

    They are of forward and of backward.
    """
    tokens, hidden = rows * world.seq_length, world.hidden
    places = tokens * (1.0 if train.mlm_head == "dense" else train.masking_probability)
    kind = (
        train.precision
        if train.precision == "bf16"
        else "tf32"
        if train.tf32
        else "fp32"
    )
    layers_worked = world.layers - (5 / 6) * (
        0.0 if train.last_layer == "dense" or train.mlm_head == "dense" else 0.85
    )
    model_dropout = train.model.config["attention_probs_dropout_prob"]
    dropout = (
        model_dropout if train.attention_dropout is None else train.attention_dropout
    )
    varlen = dropout == 0 and train.layout == "packed" and kind == "bf16"
    attention = (
        4
        * hidden
        * (
            world.mean_document_tokens
            if varlen
            else SDPA_OVER_VARLEN * world.seq_length
        )
    )
    flops = 3 * (
        (24 * hidden**2 + attention) * tokens * layers_worked
        + 2 * hidden * (hidden + VOCAB_SIZE) * places
    )
    moved = BYTES_PER_ELEMENT_AND_LAYER[kind] * tokens * hidden * layers_worked
    moved *= FUSED_SHARE["memory"] if train.compile else 1.0
    moved += BYTES_PER_LOGIT * places * VOCAB_SIZE
    return (
        flops / (PEAKS_FLOPS_PER_S[kind] * world.reached[kind]),
        moved / world.memory_bytes_per_s,
    )


def _wait(world: World, train: TrainConfig, rows: int, micro_s: float) -> float:
    made_s = rows * fill(world, train) * world.load_s_per_row
    workers = train.data.num_workers
    supply_s = made_s / max(1, workers)
    if not train.data.stage_to:
        supply_s = max(supply_s, rows / world.storage_rows_per_s)
    return (
        made_s if workers == 0 and supply_s == made_s else max(0.0, supply_s - micro_s)
    )


def _exposed(world: World, train: TrainConfig, micro_s: float) -> float:
    """Return the time of gradient synchronisation that backward does not hide."""
    if world.nodes == 1:
        return 0.0
    sent_bytes = (
        4 if train.parallel.gradient_dtype == "fp32" else 2
    ) * world.parameters
    around_s = 2 * sent_bytes * (world.nodes - 1) / world.nodes / world.node_bytes_per_s
    return max(0.02 * around_s, around_s - 2 / 3 * micro_s)


def memory_terms(world: World, train: TrainConfig, rows: int) -> dict[str, int]:
    share = world.ranks if train.parallel.strategy in ("zero1", "fsdp2") else 1
    weight_shards = world.ranks if train.parallel.strategy == "fsdp2" else 1
    per_row = (
        34
        * 2
        * world.seq_length
        * world.hidden
        * world.layers
        / (1.0 if train.precision == "fp32" else 1.6)
    )
    return {
        "parameters": 4 * world.parameters // weight_shards,
        "gradients": 4 * world.parameters // weight_shards,
        "optimizer": 8 * world.parameters // share,
        "activations: layers": int(rows * per_row),
        "head and loss": int(
            rows * world.seq_length * 0.15 * VOCAB_SIZE * BYTES_PER_LOGIT
        ),
        "non-PyTorch memory": 10**9,
    }


def memory_bytes(world: World, train: TrainConfig, rows: int) -> int:
    return sum(memory_terms(world, train, rows).values())


def max_micro_batch_size(world: World, train: TrainConfig) -> int:
    fixed_bytes = memory_bytes(world, train, 0)
    sequence_bytes = memory_bytes(world, train, 1) - fixed_bytes
    return max(1, (world.memory_bytes - fixed_bytes) // sequence_bytes)


def run_of(
    world: World,
    train: TrainConfig,
    *,
    steps: int = 40,
    noise_scale: float | None = None,
    first_step: int = 1,
) -> Run:
    draw, true = random.Random(0), step(world, train)
    peak = PEAKS_FLOPS_PER_S["bf16"] if world.gpu_name else None
    rows = []
    for number in range(first_step, first_step + steps):
        seconds = {
            name: true_s * _noise(draw, NOISE_SHARE)
            for name, true_s in true.seconds.items()
        }
        optional: dict[str, float | int | None] = {}
        if noise_scale is not None:
            optional["gradient_noise_scale_tokens"] = noise_scale * draw.uniform(
                0.8, 1.25
            )
        if world.ranks > 1:
            optional |= {
                "slowest_rank": 1,
                "slowest_rank_ratio": 1 + seconds["straggling"] / seconds["computing"],
                "longest_data_wait_s": seconds["waiting"] + seconds["starving"],
                "longest_data_wait_rank": 1,
            }
        rows.append(
            step_row(
                number,
                (true.non_padding_tokens, true.padded_tokens),
                step_s=sum(seconds.values()),
                ranks=world.ranks,
                parameters=world.parameters,
                peak=peak,
                data_wait_s=seconds["waiting"],
                compute_s=seconds["computing"],
                optimizer_s=seconds["optimizer step"],
                communication_s=seconds["network"]
                + seconds["straggling"]
                + seconds["starving"],
                **optional,
            )
        )
    micro_batches = split_global_batch(
        train.global_batch_size, train.micro_batch_size, world.ranks
    ).gradient_accumulation_steps
    return run_of_rows(
        train,
        rows,
        ranks=world.ranks,
        gradient_accumulation_steps=micro_batches,
        parameters=world.parameters,
        device=world.gpu_name or "cpu",
        peak=peak,
    )


def profile_of(world: World, train: TrainConfig) -> Profile:
    """Return the profile that tuning would have written.

    It has a curve, a sweep of DataLoader workers, and the GPU's counters.
    """
    draw = random.Random(0)
    largest = max_micro_batch_size(world, train)
    alone = replace(world, nodes=1, ranks_per_node=1, load_s_per_row=0.0)
    curve = []
    for rows in sorted(
        {largest, *(2**power for power in range(10) if 2**power <= largest)}
    ):
        simulated_step = step(
            alone,
            train.model_copy(
                update={"micro_batch_size": rows, "global_batch_size": rows}
            ),
        )
        speed = (
            simulated_step.padded_tokens
            / simulated_step.step_s
            * _noise(draw, NOISE_SHARE / 2)
        )
        curve.append(
            CurvePoint(
                size=rows,
                units_per_s=speed,
                step_s=simulated_step.padded_tokens / speed,
                timed_steps=8,
                units_per_s_low=speed * 0.985,
                units_per_s_high=speed * 1.015,
            )
        )
    probe = ProbeEvidence(
        feasible_max=largest,
        infeasible_min=largest + 1,
        feasible_peak_bytes=memory_bytes(world, train, largest),
        search_trials=2,
        seconds=60.0,
        mean_tokens_per_sequence=fill(world, train) * world.seq_length,
        curve=curve,
        parameters=world.parameters,
        traced_terms_bytes=memory_terms(world, train, largest),
        choice="",
        local_ranks=world.ranks_per_node,
    )
    return profile_with(
        train,
        probe,
        _sweep(world, train, draw),
        gpu_name=world.gpu_name,
        memory_bytes=world.memory_bytes,
        filesystem=world.filesystem,
    )


def _sweep(world: World, train: TrainConfig, draw: random.Random) -> WorkersEvidence:
    alone = replace(world, nodes=1, ranks_per_node=1)
    few = train.model_copy(update={"global_batch_size": 4 * train.micro_batch_size})
    ceiling = step(replace(alone, load_s_per_row=0.0, storage_rows_per_s=math.inf), few)
    rows = []
    for count in (0, 1, 2, 4, 8):
        simulated_step = step(alone, settings_with(few, data__num_workers=count))
        ratio = ceiling.step_s / simulated_step.step_s * _noise(draw, NOISE_SHARE / 2)
        waits = simulated_step.seconds["waiting"] / simulated_step.step_s
        # Over the whole window, in which nothing is busy while data is waited for.
        gpu = GpuUse(
            utilisation_share=0.98,
            gpm_sm_share=simulated_step.busy_share * (1 - waits),
            gpm_tensor_share=simulated_step.tensor_share * (1 - waits),
            gpm_dram_share=simulated_step.memory_share * (1 - waits),
        )
        rows.append(
            WorkersRow(
                num_workers=count,
                units_per_s=[
                    simulated_step.padded_tokens
                    / simulated_step.step_s
                    * _noise(draw, NOISE_SHARE / 2)
                    for _ in range(4)
                ],
                ratio_to_cached=ratio,
                ratio_low=ratio * 0.985,
                ratio_high=ratio * 1.015,
                verdict="verified" if ratio >= 0.98 else "refuted",
                data_wait_share=waits,
                memory_bytes=2**30 + count * 2**29,
                storage_bytes_per_s=2e8 if world.filesystem == "lustre" else 0.0,
                gpu=gpu if world.gpu_name else None,
            )
        )
    chosen = next((row.num_workers for row in rows if row.verdict == "verified"), None)
    return sweep_with(
        rows,
        [ceiling.padded_tokens / ceiling.step_s],
        chosen,
        local_ranks=world.ranks_per_node,
        filesystem=world.filesystem,
    )


def _noise(draw: random.Random, share: float) -> float:
    return math.exp(draw.gauss(0, share))
