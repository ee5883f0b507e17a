"""Simulated steps, event by event.

Loaders, hosts, devices and gradients of all ranks have their own times. A loader's
workers make batches one each, read from storage one after the other, and are as far
ahead as their queues allow. A host takes a step's batches, hands kernels to its device
one by one, and is at most a step ahead of it. A device begins a kernel when it is
handed over and the one before has ended. Buckets of gradients leave when the slowest
rank has them, one after the other. On a CPU host and device are one.

The same draws are used for any number of remedies at once: axes are variants V and
ranks W, and if events are kept, steps N before them.

Left out: what computing loses to messages that travel meanwhile, and ranks that read
each other's storage.
"""

from collections import deque
from dataclasses import dataclass, fields

import numpy as np

from autotune.evidence.advice import Cause
from testbed.simulators.kernels import Floats
from testbed.simulators.machines import Machine

Remedy = Cause | str
NOTHING, LAUNCHES = "nothing", "launches"
"""No remedy, and one that takes launches away but leaves what goes by between steps.
Several at once: ``a+b``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """Random draws, the same for every remedy."""

    computing_NW: Floats
    """Of all kernels of a rank and step, without what a slow rank takes longer."""
    slower_NW: Floats
    """And with it, to without."""
    places_NW: Floats
    """Of a rank's step, to the mean."""
    fill_NW: Floats
    making_NMW: Floats
    burst_NMW: Floats
    """1 where storage holds up a batch."""
    ring_NB: Floats
    host_NW: Floats
    held_up_NW: Floats
    """In steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Work on a machine: training, or a window of tuning."""

    steps: int
    world_size: int
    micro_batches: int
    log_interval: int | None
    """None: nothing is logged or saved, and no first step is slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Moments of every step, as the trainer's step and meter take them, NVW.

    Waits are in seconds.
    """

    waited_s: Floats
    began: Floats
    asked: Floats
    counted: Floats
    departed: Floats
    reduced: Floats
    updated: Floats
    closed: Floats
    """The end of an interval, where one ends with this step."""
    restarted: Floats
    """The beginning of the next."""


MARKS = tuple(field.name for field in fields(Marks))
UPDATED = MARKS.index("updated")


def draw_events(
    machine: Machine, conditions: Conditions, draw: np.random.Generator
) -> Draws:
    """Draw the random events of all steps of all ranks."""
    steps, world, pace, supply = (
        conditions.steps,
        conditions.world_size,
        machine.pace,
        machine.supply,
    )
    jitter = draw.normal(0, 1, (steps, world))
    for number in range(1, steps):
        jitter[number] = (
            pace.persistence * jitter[number - 1]
            + np.sqrt(1 - pace.persistence**2) * jitter[number]
        )
    slower = np.ones((steps, world))
    if pace.slow_rank < world:
        slower[:, pace.slow_rank] = np.where(
            _phases(pace.phase_steps, steps, draw), pace.slow_ratio, 1.0
        )
    micro = (steps, conditions.micro_batches, world)
    deviation = supply.make_deviation
    making = np.exp(draw.normal(0, deviation, micro) - deviation**2 / 2)
    if supply.slow_rank is not None and supply.slow_rank < world:
        making[:, :, supply.slow_rank] *= supply.slow_ratio
    held_up = np.zeros((steps, world))
    happened = draw.random(steps) < pace.held_up_probability
    held_up[happened, draw.integers(world, size=int(happened.sum()))] = draw.uniform(
        0.2, 2.0, int(happened.sum())
    )
    computing = np.exp(pace.jitter * jitter)
    if conditions.log_interval is not None:
        computing[0] *= pace.first_step
    return Draws(
        computing_NW=computing,
        slower_NW=slower,
        places_NW=np.exp(draw.normal(0, machine.uneven_widths, (steps, world))),
        fill_NW=np.clip(
            draw.normal(machine.fill, machine.fill_deviation, (steps, world)), 0.1, 1.0
        ),
        making_NMW=making,
        burst_NMW=(draw.random(micro) < supply.burst_probability).astype(float),
        ring_NB=np.exp(
            draw.normal(0, machine.ring_deviation, (steps, len(machine.bucket_s)))
        ),
        host_NW=np.exp(draw.normal(0, 0.05, (steps, world))),
        held_up_NW=held_up,
    )


def _phases(phase_steps: int | None, steps: int, draw: np.random.Generator) -> Floats:
    """1 where a rank is slow."""
    if phase_steps is None:
        return np.ones(steps)
    changes = draw.random(steps) < 1 / phase_steps
    return np.asarray((np.cumsum(changes) + draw.integers(2)) % 2, dtype=np.float64)


class Timeline:
    """A machine's steps, with each of these remedies.

    Args:
        machine: The machine that trains.
        conditions: Conditions of the training.
        draws: Random draws, for as many steps and ranks.
        remedies: Limits that are taken away, each alone.
    """

    def __init__(
        self,
        machine: Machine,
        conditions: Conditions,
        draws: Draws,
        remedies: tuple[Remedy, ...] = (NOTHING,),
    ) -> None:
        self._machine, self._conditions, self._draws = machine, conditions, draws
        self._shape = (len(remedies), conditions.world_size)
        self._remedies = remedies
        self._on_gpu = machine.device.on_gpu
        self._equal, self._full = self._is("straggler"), self._is("padding")
        self._hosts, self._links = (
            self._without("launch-bound"),
            self._without("network"),
        )
        self._latency_s = self._links * machine.latency_s
        self._update_s = self._without("optimizer step") * machine.optimizer_step_s
        launches = self._without("launch-bound", LAUNCHES) * machine.host.launch_s
        self._launch_s = launches if self._on_gpu else np.zeros_like(launches)
        kernels = machine.kernels
        with_memory, without = kernels.seconds(), kernels.seconds(memory_is_free=True)
        each = np.where(
            self._is("memory"), without[:, None, None], with_memory[:, None, None]
        )
        self._body = np.cumsum(each * ~kernels.in_head[:, None, None], axis=0)
        self._head = np.cumsum(each * kernels.in_head[:, None, None], axis=0)
        self._numbers = np.arange(1, len(each) + 1)[:, None, None]
        self._ends = np.array((kernels.forward, *machine.bucket_ends)) - 1
        if not self._on_gpu:  # each is handed over and computed by the same thread
            self._body = (self._body + launches * self._numbers)[self._ends]
            self._head = self._head[self._ends]
        self._step_s = conditions.micro_batches * float(with_memory.sum())
        self._loader = _Loader(machine, self._without("data loading"), self._shape)

    def _is(self, *remedies: Remedy) -> np.ndarray:
        return np.array(
            [
                [not set(remedies).isdisjoint(remedy.split("+"))]
                for remedy in self._remedies
            ]
        )

    def _without(self, *remedies: Remedy) -> Floats:
        return 1.0 - self._is(*remedies)

    def run(self) -> Marks:
        """Play all steps."""
        loader, conditions = self._loader, self._conditions
        ended = host = loader.drain(np.zeros(self._shape))
        steps: list[tuple[Floats, ...]] = []
        for number in range(conditions.steps):
            asked_for, last_updated = host, steps[-1][UPDATED] if steps else ended
            host = loader.take(host, self._draws, number)
            waited = np.maximum(0.0, host - np.maximum(asked_for, last_updated))
            host = host + self._hosts * self._draws.held_up_NW[number] * self._step_s
            before = ended
            moments, host = self._compute(number, host, ended)
            updated, host = self._update(moments[-1], host)
            closed, ended, host = self._between(number, updated, host, before)
            steps.append((waited, *moments, updated, closed, ended))
        columns = [np.stack(column) for column in zip(*steps, strict=True)]
        return Marks(**dict(zip(MARKS, columns, strict=True)))

    def _compute(
        self, number: int, host: Floats, ended: Floats
    ) -> tuple[tuple[Floats, ...], Floats]:
        """Compute forward and backward of all micro-batches.

        Returns:
            The moments ``began``, ``asked``, ``counted``, ``departed`` and ``reduced``
            of the marks; and the host's moment after the step's launches.
        """
        passed, late = self._pass(number)
        launches_s = self._launch_s * len(self._numbers) * self._draws.host_NW[number]
        device = began = np.maximum(host, ended)
        asked = counted = began
        for micro_batch in range(self._conditions.micro_batches):
            forward = passed[0] + np.maximum(device, host + late[0])
            if micro_batch == 0:
                asked, counted = forward, self._told(began, forward)
                forward = counted
            behind = host + np.maximum.accumulate(late[1:], axis=0)
            ready = passed[1:] + np.maximum(forward - passed[0], behind)
            device = ready[-1]
            host = host + launches_s
        if not self._on_gpu:
            host = device
        departed = device
        reduced = (
            departed
            if self._shape[1] == 1
            else np.maximum(departed, self._travelled(number, ready))
        )
        return (began, asked, counted, departed, reduced), host

    def _pass(self, number: int) -> tuple[Floats, Floats]:
        """Return the kernel times of a micro-batch, from when the host began.

        Returns:
            Seconds of all kernels up to the end of forward, and to each bucket; and the
            latest hand-over within each of these parts, less the seconds of all parts
            before it.
        """
        draws = self._draws
        without, slow = draws.computing_NW[number], draws.slower_NW[number]
        pace = without * slow
        # The median rank.
        equal = np.partition(pace, (len(pace) - 1) // 2)[(len(pace) - 1) // 2]
        speed = np.where(self._equal, equal, pace)
        # Rows that are full are as full on every rank.
        uneven = np.where(self._equal, 1.0, draws.places_NW[number])
        places = np.where(self._full, self._machine.fill, uneven)
        real = draws.fill_NW[number] * uneven  # of which a part is predicted
        seconds = (speed * places) * self._body
        seconds += (speed * real) * self._head
        if not self._on_gpu:
            return seconds, np.full_like(seconds, -np.inf)
        handed = self._numbers * (self._launch_s * draws.host_NW[number])
        handed[1:] -= seconds[:-1]
        return seconds[self._ends], np.maximum.reduceat(
            handed, (0, *self._ends[:-1] + 1), axis=0
        )

    def _told(self, began: Floats, forward: Floats) -> Floats:
        """Return when a rank knows how many tokens all ranks predict."""
        if self._shape[1] == 1:
            return forward
        known: Floats = began.max(axis=1, keepdims=True) + self._latency_s
        return np.maximum(forward, known)

    def _travelled(self, number: int, ready: Floats) -> Floats:
        """Return when the last bucket has arrived.

        Each leaves when all ranks have it, behind the one before.
        """
        seconds = self._machine.bucket_s * self._draws.ring_NB[number]
        arrived = np.zeros((self._shape[0], 1))
        for bucket, slowest in enumerate(ready.max(axis=2)):
            arrived = (
                np.maximum(arrived, slowest[:, None])
                + self._links * seconds[bucket]
                + self._latency_s
            )
        return arrived

    def _update(self, reduced: Floats, host: Floats) -> tuple[Floats, Floats]:
        updated = np.maximum(reduced, host) + self._update_s
        return updated, host if self._on_gpu else updated

    def _between(
        self, number: int, updated: Floats, host: Floats, before: Floats
    ) -> tuple[Floats, Floats, Floats]:
        """Return the moments until the next step.

        They are the end of an interval, the device's next moment, and the host's.
        """
        conditions, program = self._conditions, self._machine.host
        # The numbers of the step before are looked at while the device is at this one.
        host = np.maximum(host, before)
        interval = conditions.log_interval
        if interval is None:
            return updated, updated, host
        ended = closed = updated
        if (number + 1) % interval == 0 or number + 1 == conditions.steps:
            closed = np.maximum(updated, host)
            # Figures are added up over all ranks before the next interval begins.
            ended = closed.max(axis=1, keepdims=True) + np.zeros(self._shape)
            ended = ended + (2 * self._latency_s if self._shape[1] > 1 else 0.0)
            host = (host if self._on_gpu else ended) + self._hosts * program.between_s
        if (
            program.save_interval_steps is not None
            and (number + 1) % program.save_interval_steps == 0
        ):
            host = np.maximum(host, ended) + self._hosts * program.save_s
        return closed, ended, host


class _Loader:
    """Of every rank: workers, their queues, and storage."""

    def __init__(self, machine: Machine, kept: Floats, shape: tuple[int, int]) -> None:
        self._supply, self._kept, self._world_size = machine.supply, kept, shape[1]
        since = np.zeros(shape)
        workers = self._supply.workers
        self._ahead = workers * self._supply.prefetch
        self._taken = deque([since] * self._ahead, maxlen=self._ahead)
        self._free = deque([since] * workers, maxlen=workers)
        self._storage = since

    def take(self, host: Floats, draws: Draws, number: int) -> Floats:
        """Return when the host has the micro-batches of a step."""
        for making, burst in zip(
            draws.making_NMW[number], draws.burst_NMW[number], strict=True
        ):
            host = self._one(host, making, burst)
        return host

    def drain(self, host: Floats) -> Floats:
        """Return when the host has taken twice what the queues hold.

        A run is longer than a full queue lasts, and a record here is not.
        """
        mean = np.ones(self._world_size)
        for _ in range(2 * self._ahead):
            host = self._one(host, mean, 0 * mean)
        return host

    def _one(self, host: Floats, making: Floats, burst: Floats) -> Floats:
        supply = self._supply
        make_s = self._kept * supply.make_s * making
        read_s = self._kept * (supply.storage_s + supply.burst_s * burst)
        if not supply.workers:
            return host + make_s + read_s
        self._storage = (
            np.maximum(np.maximum(self._free[0], self._taken[0]), self._storage)
            + read_s
        )
        made = self._storage + make_s
        got = np.maximum(host, made)
        self._free.append(made)
        self._taken.append(got)
        return got
