"""All fault loops of training, as ``python -m tests.system.faults`` runs them in full."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

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


Run = Callable[..., dict[str, Any]]
"""What a loop does in a ``Workplace``: so many ``points``, by a ``seed``; returns its figures."""


@dataclass(frozen=True, slots=True)
class Loop:
    """A fault loop: what is injected, what is then held, and the points of a whole soak."""

    name: str
    injected: str
    held: str
    in_full: int
    run: Run
    needs_mount: bool = False


def _interrupted(*ways: Interruption, **options: Any) -> Run:
    return partial(interrupt, interruptions=ways, **options)


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
        f"SIGKILL, {ranks} rank{'s' * (ranks > 1)}",
        f"SIGKILL of torchrun and all that it started{with_loaders}; a save is nearly always under way",
        SAME_END,
        10,
        _interrupted(kill_all, ranks=ranks, settings=settings),
    )


LOOPS = (
    _killed(1, settings=PRESSED),
    _killed(2, settings=PRESSED | WITH_LOADERS),
    _killed(3, settings=PRESSED),
    Loop("signal to one rank", "SIGTERM, SIGINT, SIGUSR1, SIGUSR2 or SIGHUP to one rank", NOTHING_LOST, 8,
         _interrupted(signal_rank)),
    Loop("signal to torchrun", "SIGTERM to torchrun", NOTHING_LOST, 3, _interrupted(signal_torchrun)),
    Loop("torchrun dead", "SIGKILL to torchrun alone", f"the ranks notice, and leave; {NOTHING_LOST}", 2,
         _interrupted(kill_torchrun)),
    Loop("out of time", "`train.stop_after_s` shorter than the training", f"over before that time; {NOTHING_LOST}", 2,
         _interrupted(run_out_of_time, most_of_a_run=1)),
    Loop("second signal", "two SIGTERMs while a rank hangs",
         f"gone within 3 s, code 75, older checkpoints whole; {SAME_END}", 3, _interrupted(signal_twice)),
    Loop("hung rank", "a rank sleeps; `train.parallel.timeout_s = 8`",
         f"over within 53 s, code 75, a traceback names the place; {SAME_END}", 3, _interrupted(hang)),
    Loop("dead rank", "SIGKILL of one rank", f"code 75; {SAME_END}", 3, _interrupted(kill_rank)),
    Loop("bug on a rank", "an exception on one rank", f"code 70, its reason and traceback; {SAME_END}", 2,
         _interrupted(raise_on_rank)),
    Loop("rank that cannot begin", "a rank other than the first lacks its local disk's variable",
         f"code 3 and its reason, not 75; {SAME_END}", 2, _interrupted(fail_before_it_begins)),
    Loop("truncated checkpoint", "one file of the newest checkpoint cut short, or absent",
         "passed over, the one before is used", 60, truncate),
    Loop("truncated checkpoint, resumed", "SIGKILL, and the newest checkpoint cut short",
         f"passed over, and the record says so; {SAME_END}", 3, _interrupted(damage)),
    Loop("full disk",
         "the disk of the checkpoints, or of the whole run, is filled for a while; one that is too small at the start",
         "training goes on, the old checkpoint is whole, the next save works, no row is lost; refused with code 3",
         3, _filled, needs_mount=True),
    Loop("sick steps, left out", "one NaN and one loss times 20 on one rank, `on_spike = skip`",
         "all ranks leave out both, and agree to the bit", 2, leave_out),
    Loop("spike, taken", "one loss times 20 on one rank, `on_spike = warn`",
         "told, with its samples; all ranks agree to the bit", 1, take),
    Loop("spike, rolled back", "one loss times 20 on one rank, `on_spike = rollback`; SIGKILL soon after",
         "the data since the checkpoint is left out, the rate eased; killed or not, the same weights", 3, roll_back),
    Loop("sick for ever", "NaN from a step on", "2 rollbacks, then code 76; started again it is refused", 2,
         not_finite_for_ever),
    Loop("other ranks", "2, then 3 (SIGKILLed), then 1 ranks", "the same data, the loss of every step to 1e-4", 2,
         _moved(*RANKS)),
    Loop("other strategies", "zero1, fsdp2 (SIGKILLed), ddp, fsdp2, each with evaluations on the way",
         "the same data, the loss of every step to 1e-4", 1, _moved(*STRATEGIES)),
)  # fmt: skip
