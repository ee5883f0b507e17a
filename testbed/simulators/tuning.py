"""Measurements of a tuning on a simulated machine.

They are windows of training on one node, and steps that synchronise gradients. Windows
are of a node's ranks and of four micro-batches to a step at most, begin with empty
queues, and have windows on cached batches beside them. Counters are read from the
kernels of a window: what they multiply and move, and when they run, over the time of
the window. Steps with gradient synchronisation are of all ranks on cached batches.
"""

import itertools
from dataclasses import replace

import numpy as np

from autotune.evidence.gpu_use import GpuUse
from autotune.evidence.network import ComputeEvidence, GradientSyncRow, NetworkEvidence
from autotune.evidence.probe import ProbeEvidence
from autotune.evidence.profile import Profile
from autotune.evidence.workers import WorkersEvidence, WorkersRow
from autotune.network.decide.step_model import expected_largest
from testbed.simulators.machines import Machine
from testbed.simulators.records import profile_with, sweep_with
from testbed.simulators.timeline import (
    NOTHING,
    Conditions,
    Draws,
    Marks,
    Timeline,
    draw_events,
)

MOST_MICRO_BATCHES = 4
WINDOWS, STEPS_OF_A_WINDOW, WARM_UP_STEPS = 5, 8, 2
STEPS_OF_AN_EXCHANGE = 12
COUNTER_DEVIATION = 0.02
"""Of what counters read, relative."""
PRODUCTS_IN_USE = (0.9, 1.0)
"""Matrix units count as in use while they multiply; of what products reach, the rest is
filling and draining them."""
UPDATE_BUSY_SHARE = 0.95


def profile_of_machine(machine: Machine, draw: np.random.Generator) -> Profile:
    """Return a profile with probe, workers and, for several ranks, network."""
    shape, train = machine.shape, machine.train
    probe = ProbeEvidence(
        feasible_max=train.micro_batch_size,
        feasible_peak_bytes=2**34,
        search_trials=2,
        seconds=60.0,
        mean_tokens_per_sequence=machine.fill * shape.seq_length_tokens,
        curve=[],
        parameters=shape.parameters,
        choice="",
        local_ranks=machine.local_ranks,
    )
    workers = _workers(machine, draw)
    network = _network(machine, draw) if machine.world_size > 1 else None
    gpu_name = machine.device.name if machine.device.on_gpu else None
    return profile_with(
        train, probe, workers, network, gpu_name=gpu_name, memory_bytes=2**35
    )


def _workers(machine: Machine, draw: np.random.Generator) -> WorkersEvidence:
    conditions = Conditions(
        steps=WARM_UP_STEPS + WINDOWS * STEPS_OF_A_WINDOW,
        world_size=machine.local_ranks,
        micro_batches=min(MOST_MICRO_BATCHES, machine.micro_batches),
        log_interval=None,
    )
    from_loader = _Windows(
        machine, conditions, draw_events(machine, conditions, draw), keeps_up=False
    )
    from_memory = _Windows(
        machine, conditions, draw_events(machine, conditions, draw), keeps_up=True
    )
    ratios = np.log(from_memory.step_s / from_loader.step_s)
    half = 2.5 * ratios.std(ddof=1) / np.sqrt(WINDOWS)
    slots = (
        conditions.micro_batches
        * conditions.world_size
        * machine.train.micro_batch_size
        * machine.shape.seq_length_tokens
    )
    rates = {
        name: list(slots / timed.step_s)
        for name, timed in (("loader", from_loader), ("memory", from_memory))
    }
    ratio = float(np.exp(ratios.mean()))
    row = WorkersRow(
        num_workers=machine.supply.workers,
        units_per_s=rates["loader"],
        ratio_to_cached=ratio,
        ratio_low=ratio * float(np.exp(-half)),
        ratio_high=ratio * float(np.exp(half)),
        verdict="verified" if ratio >= 0.98 else "refuted",
        data_wait_share=from_loader.data_wait_share,
        memory_bytes=2**31,
        storage_bytes_per_s=0.0,
        gpu=(
            _counters(machine, from_loader, draw)
            if machine.device.has_counters
            else None
        ),
    )
    chosen = machine.supply.workers if ratio >= 0.98 else None
    return sweep_with([row], rates["memory"], chosen, local_ranks=conditions.world_size)


class _Windows:
    """Windows one after the other, on the machine's loader or from memory."""

    def __init__(
        self, machine: Machine, conditions: Conditions, draws: Draws, *, keeps_up: bool
    ) -> None:
        remedy = "data loading" if keeps_up else NOTHING
        marks = Timeline(machine, conditions, draws, (remedy,)).run()
        edges = WARM_UP_STEPS + STEPS_OF_A_WINDOW * np.arange(WINDOWS + 1) - 1
        self.seconds = np.diff(marks.updated[edges, 0].max(axis=1))
        self.step_s = self.seconds / STEPS_OF_A_WINDOW
        # All ranks' added up, of the slowest one's time.
        waits = [
            marks.waited_s[a + 1 : b + 1, 0].sum() for a, b in itertools.pairwise(edges)
        ]
        self.data_wait_share = min(
            1.0, float(np.median(np.array(waits) / self.seconds))
        )
        inside = slice(int(edges[0]) + 1, int(edges[-1]) + 1)
        self.micro_batches = conditions.micro_batches
        speed = draws.computing_NW * draws.slower_NW
        self.body, self.head = (
            float((speed * share_NW)[inside].mean())
            for share_NW in (draws.places_NW, draws.fill_NW * draws.places_NW)
        )
        self.places = float(draws.places_NW[inside].mean())
        self.fill = float((draws.fill_NW * draws.places_NW)[inside].mean())


def _counters(machine: Machine, windows: _Windows, draw: np.random.Generator) -> GpuUse:
    """Over whole windows and all GPUs of the node."""
    kernels, device = machine.kernels, machine.device
    scale = np.where(kernels.in_head, windows.head, windows.body)
    places = np.where(kernels.in_head, windows.fill, windows.places)
    micro, step_s = windows.micro_batches, float(windows.step_s.mean())
    busy_s = micro * float((scale * kernels.seconds()).sum()) * kernels.busy_share
    busy_s += machine.optimizer_step_s * UPDATE_BUSY_SHARE
    in_use = draw.uniform(*PRODUCTS_IN_USE)
    multiplied_s = (
        micro
        * float((places * kernels.flops).sum())
        / (device.peak_flops_per_s * in_use)
    )
    moved_s = micro * float((places * kernels.bytes).sum()) / device.memory_bytes_per_s
    moved_s += machine.optimizer_step_s * machine.shape.memory_reach

    def read(seconds: float) -> float:
        return min(
            1.0, seconds / step_s * float(np.exp(draw.normal(0, COUNTER_DEVIATION)))
        )

    return GpuUse(
        utilisation_share=0.98,
        gpm_sm_share=read(busy_s),
        gpm_tensor_share=read(multiplied_s),
        gpm_dram_share=read(moved_s),
    )


def _network(machine: Machine, draw: np.random.Generator) -> NetworkEvidence:
    """Return the default gradient synchronisation, measured on all ranks.

    Steps of one micro-batch without synchronisation are beside it.
    """
    conditions = Conditions(
        steps=WARM_UP_STEPS + STEPS_OF_AN_EXCHANGE,
        world_size=machine.world_size,
        micro_batches=machine.micro_batches,
        log_interval=None,
    )
    marks = Timeline(
        machine, conditions, draw_events(machine, conditions, draw), ("data loading",)
    ).run()
    step_s, exposed = (
        _step_s(marks),
        (marks.reduced - marks.departed)[WARM_UP_STEPS:, 0],
    )
    # Of the rank that waits longest for gradients after its own have left.
    waiting = min(1.0, float(np.median(exposed, axis=0).max()) / step_s)
    parallel, train = machine.train.parallel, machine.train
    row = GradientSyncRow(
        strategy=parallel.strategy,
        gradient_dtype=parallel.gradient_dtype,
        bucket_cap_mib=parallel.bucket_cap_mib,
        gradient_accumulation_steps=machine.micro_batches,
        micro_batch_size=train.micro_batch_size,
        step_s=step_s,
        steps=STEPS_OF_AN_EXCHANGE,
        compute_share=1 - waiting,
        communication_share=waiting,
        outcome="ran",
    )
    return NetworkEvidence(
        nodes=max(1, machine.world_size // machine.local_ranks),
        ranks_per_node=machine.local_ranks,
        backend="nccl",
        transport="",
        links=[],
        matmul_flops_per_s=[],
        default_micro_batch_size=train.micro_batch_size,
        compute=_compute(machine, replace(conditions, micro_batches=1), draw),
        gradient_syncs=[row],
        choice="the default",
        windows=1,
        seconds=60.0,
    )


def _compute(
    machine: Machine, conditions: Conditions, draw: np.random.Generator
) -> ComputeEvidence:
    """Measure the compute of a rank while none waits for another's gradients."""
    marks = Timeline(
        machine, conditions, draw_events(machine, conditions, draw), ("input+network",)
    ).run()
    computed = (marks.asked - marks.began + marks.departed - marks.counted)[
        WARM_UP_STEPS:, 0
    ]
    jitter = float(np.median(computed.std(axis=0) / computed.mean(axis=0)))
    # The tuner takes the wait for the slowest of these ranks out again.
    alone = 1 / (1 + jitter * expected_largest(machine.world_size))
    return ComputeEvidence(
        micro_batch_size=machine.train.micro_batch_size,
        micro_batch_s=alone * (_step_s(marks) - machine.optimizer_step_s),
        fixed_s=0.0,
        optimizer_step_s=machine.optimizer_step_s,
        forward_share=1 / 3,
        jitter_share=jitter,
        slowdown_share=0.0,
        gradient_elements=[1],
        gradient_ready_shares=[1.0],
    )


def _step_s(marks: Marks) -> float:
    """Return the step time of the slowest rank."""
    return float(
        np.median(np.diff(marks.updated[WARM_UP_STEPS - 1 :, 0], axis=0).max(axis=1))
    )
