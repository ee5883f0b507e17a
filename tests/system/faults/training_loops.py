"""All fault loops of training, as ``python -m tests.system.faults`` runs them in full."""

from dataclasses import dataclass
from typing import Any, Protocol

from tests.system.faults.disks import fill, refuse_a_small_disk, truncate
from tests.system.faults.interruptions import (
    Interruption,
    damage,
    fail_before_it_begins,
    hang,
    kill_all,
    kill_rank,
    kill_torchrun,
    raise_on_rank,
    run_out_of_time,
    signal_rank,
    signal_torchrun,
    signal_twice,
)
from tests.system.faults.jobs import Settings, Workplace
from tests.system.faults.moves import RANKS, STRATEGIES, Stage, move
from tests.system.faults.sick import leave_out, not_finite_for_ever, roll_back, take
from tests.system.faults.train import PRESSED, WITH_LOADERS, interrupt

TRAINING = "training"
"""Where their figures are among those of the other loops."""
SAME_END = "same record, weights bit-identical"
NOTHING_LOST = f"code 75, the last step saved; {SAME_END}"


class Run(Protocol):
    """What a loop does: so many points, by a seed; returns its figures."""

    def __call__(self, place: Workplace, *, points: int, seed: int) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A fault loop."""

    name: str
    injected: str
    held: str
    in_full: int
    """Points of a whole soak."""
    run: Run
    needs_mount: bool = False


def _interrupted(*ways: Interruption, ranks: int = 2, settings: Settings | None = None, most_of_a_run: int = 5) -> Run:
    def run(place: Workplace, *, points: int, seed: int) -> dict[str, Any]:
        return interrupt(place, points, seed, ways, ranks=ranks, settings=settings, most_of_a_run=most_of_a_run)

    return run


def _moved(*stages: Stage) -> Run:
    def run(place: Workplace, *, points: int, seed: int) -> dict[str, Any]:
        found = [move(place, stages, seed + point) for point in range(points)]
        return {
            "faults": sum(one["faults"] for one in found),
            "runs": points,
            "largest_relative_difference_of_loss": max(one["largest_relative_difference_of_loss"] for one in found),
        }

    return run


def _filled(place: Workplace, *, points: int, seed: int) -> dict[str, Any]:
    """As rank 0 writes alone, as all ranks write a share, and as the record lies on that disk, too."""
    del seed
    ways: tuple[dict[str, Any], ...] = ({}, {"strategy": "zero1"}, {"with_record": True})
    found = [fill(place, **ways[point % len(ways)]) for point in range(points)]
    refuse_a_small_disk(place)
    return {"faults": points + 1, "runs": points + 1, "bit_identical": sum(one["bit_identical"] for one in found)}


def _killed(ranks: int, *, settings: Settings) -> Loop:
    with_loaders = ", with loader processes" if "train.data.loader_workers" in settings else ""
    return Loop(
        name=f"SIGKILL, {ranks} rank{'s' * (ranks > 1)}",
        injected=f"SIGKILL of torchrun and all that it started{with_loaders}; a save is nearly always under way",
        held=SAME_END,
        in_full=10,
        run=_interrupted(kill_all, ranks=ranks, settings=settings),
    )


LOOPS = (
    _killed(1, settings=PRESSED),
    _killed(2, settings=PRESSED | WITH_LOADERS),
    _killed(3, settings=PRESSED),
    Loop(
        name="signal to one rank",
        injected="SIGTERM, SIGINT, SIGUSR1, SIGUSR2 or SIGHUP to one rank",
        held=NOTHING_LOST,
        in_full=8,
        run=_interrupted(signal_rank),
    ),
    Loop(
        name="signal to torchrun",
        injected="SIGTERM to torchrun",
        held=NOTHING_LOST,
        in_full=3,
        run=_interrupted(signal_torchrun),
    ),
    Loop(
        name="torchrun dead",
        injected="SIGKILL to torchrun alone",
        held=f"the ranks notice, and leave; {NOTHING_LOST}",
        in_full=2,
        run=_interrupted(kill_torchrun),
    ),
    Loop(
        name="out of time",
        injected="`train.stop_after_s` shorter than the training",
        held=f"over before that time; {NOTHING_LOST}",
        in_full=2,
        run=_interrupted(run_out_of_time, most_of_a_run=1),
    ),
    Loop(
        name="second signal",
        injected="two SIGTERMs while a rank hangs",
        held=f"gone within 3 s, code 75, older checkpoints whole; {SAME_END}",
        in_full=3,
        run=_interrupted(signal_twice),
    ),
    Loop(
        name="hung rank",
        injected="a rank sleeps; `train.parallel.timeout_s = 8`",
        held=f"over within 53 s, code 75, a traceback names the place; {SAME_END}",
        in_full=3,
        run=_interrupted(hang),
    ),
    Loop(
        name="dead rank",
        injected="SIGKILL of one rank",
        held=f"code 75; {SAME_END}",
        in_full=3,
        run=_interrupted(kill_rank),
    ),
    Loop(
        name="bug on a rank",
        injected="an exception on one rank",
        held=f"code 70, its reason and traceback; {SAME_END}",
        in_full=2,
        run=_interrupted(raise_on_rank),
    ),
    Loop(
        name="rank that cannot begin",
        injected="a rank other than the first lacks its local disk's variable",
        held=f"code 3 and its reason, not 75; {SAME_END}",
        in_full=2,
        run=_interrupted(fail_before_it_begins),
    ),
    Loop(
        name="truncated checkpoint",
        injected="one file of the newest checkpoint cut short, or absent",
        held="passed over, the one before is used",
        in_full=60,
        run=truncate,
    ),
    Loop(
        name="truncated checkpoint, resumed",
        injected="SIGKILL, and the newest checkpoint cut short",
        held=f"passed over, and the record says so; {SAME_END}",
        in_full=3,
        run=_interrupted(damage),
    ),
    Loop(
        name="full disk",
        injected="the disk of the checkpoints, or of the whole run, is filled for a while; one that is too small from "
        "the start",
        held="training goes on, the old checkpoint is whole, the next save works, no row is lost; refused with code 3",
        in_full=3,
        run=_filled,
        needs_mount=True,
    ),
    Loop(
        name="sick steps, left out",
        injected="one NaN and one loss times 20 on one rank, `on_spike = skip`",
        held="all ranks leave out both, and agree to the bit",
        in_full=2,
        run=leave_out,
    ),
    Loop(
        name="spike, taken",
        injected="one loss times 20 on one rank, `on_spike = warn`",
        held="told, with its samples; all ranks agree to the bit",
        in_full=1,
        run=take,
    ),
    Loop(
        name="spike, rolled back",
        injected="one loss times 20 on one rank, `on_spike = rollback`; SIGKILL soon after",
        held="the data since the checkpoint is left out, the rate eased; killed or not, the same weights",
        in_full=3,
        run=roll_back,
    ),
    Loop(
        name="sick for ever",
        injected="NaN from a step on",
        held="2 rollbacks, then code 76; started again it is refused",
        in_full=2,
        run=not_finite_for_ever,
    ),
    Loop(
        name="other ranks",
        injected="2, then 3 (SIGKILLed), then 1 ranks",
        held="the same data, the loss of every step to 1e-4",
        in_full=2,
        run=_moved(*RANKS),
    ),
    Loop(
        name="other strategies",
        injected="zero1, fsdp2 (SIGKILLed), ddp, fsdp2, each with evaluations on the way",
        held="the same data, the loss of every step to 1e-4",
        in_full=1,
        run=_moved(*STRATEGIES),
    ),
)
