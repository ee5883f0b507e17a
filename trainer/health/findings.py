"""Findings of the health checks: kinds, actions, likely causes and next steps.

No torch here.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainer.formats.events import EventRow, new_event


class Kind(enum.StrEnum):
    """Kind of finding."""

    NON_FINITE = "non_finite"
    """A loss or gradient norm that is infinite or not a number."""
    SPIKE = "spike"
    """A loss far above those of the last steps."""
    EXPLOSION = "explosion"
    """A gradient norm far above those of the last steps and above ``max_grad_norm``."""
    PLATEAU = "plateau"
    """A loss that has stopped falling."""
    RISE = "rise"
    """A loss that rises over many steps."""
    STARVED = "starved"
    """GPUs that wait for data."""
    STRAGGLER = "straggler"
    """A rank that is slower than the others."""


class Action(enum.StrEnum):
    """Action on a finding.

    Declared from the mildest to the strongest: the order decides which one is taken.
    """

    WARN = "warn"
    """Report the finding only."""
    SKIP = "skip"
    """Skip the update of the step."""
    ROLL_BACK = "rollback"
    """Return to an earlier checkpoint."""
    GIVE_UP = "give_up"
    """Stop the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Unusual observation on a run, and the action taken."""

    kind: Kind
    action: Action
    message: str
    """Description of the finding, with the values behind it."""
    values: dict[str, float]
    """Numbers behind the message, by name."""

    @property
    def next_step(self) -> str:
        """Instructions for you on this kind of finding."""
        return ADVICE[self.kind].next_step

    def event(self, step: int, samples: Sequence[int] = ()) -> EventRow:
        """Return the event for the run record.

        ``samples`` are dataset indices of the step's samples, over all ranks.
        """
        is_severe = self.action in (Action.ROLL_BACK, Action.GIVE_UP)
        advice = ADVICE[self.kind]
        return new_event(
            step,
            self.kind.value,
            self.message,
            values=self.values,
            level="error" if is_severe else "warning",
            action=self.action.value,
            causes=list(advice.causes),
            next_step=advice.next_step,
            samples=list(samples),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Explanation of a kind of finding."""

    causes: tuple[str, ...]
    """Likely causes, most likely first."""
    next_step: str
    """Instructions for you."""


ADVICE: Mapping[Kind, Advice] = {
    Kind.NON_FINITE: Advice(
        causes=(
            "the learning rate is too high, and weights or activations overflowed",
            "an overflow in low precision, or in gradients synchronised in 16 bits",
            "a hardware fault, if it happens once and in no other run",
        ),
        next_step=(
            "If it happens again, lower train.learning_rate or increase"
            " train.warmup_steps; try train.precision = 'fp32' and"
            " train.parallel.gradient_dtype = 'fp32' to rule out an overflow."
        ),
    ),
    Kind.SPIKE: Advice(
        causes=(
            "the learning rate is too high for this phase of training",
            "a batch of unusual data: broken text, another language, long repetitions",
            (
                "the optimizer's second moments are stale; a lower adam_beta2 updates"
                " them faster"
            ),
        ),
        next_step=(
            "If spikes are frequent or the loss does not recover, lower"
            " train.learning_rate, increase train.warmup_steps or set train.adam_beta2"
            " to 0.98; set train.health.on_spike to skip such batches ('skip') or to"
            " undo them ('rollback')."
        ),
    ),
    Kind.EXPLOSION: Advice(
        causes=(
            "the learning rate is too high, or the warm-up too short",
            "a batch of unusual data",
            "train.max_grad_norm is far below ordinary gradient norms",
        ),
        next_step=(
            "Increase train.warmup_steps or lower train.learning_rate; raise"
            " train.max_grad_norm if ordinary norms are far above it. Set"
            " train.health.on_explosion to skip such batches ('skip') or to undo them"
            " ('rollback')."
        ),
    ),
    Kind.PLATEAU: Advice(
        causes=(
            "the learning rate is too high to improve further, or already decayed",
            "the capacity of the model, or the data, is exhausted",
            "early in a run: only token frequencies are learned so far, which passes",
        ),
        next_step=(
            "Check the validation loss (train.evaluation.interval_steps). If it is flat"
            " as well, decay the learning rate (train.schedule, train.max_steps),"
            " change train.learning_rate, or stop here."
        ),
    ),
    Kind.RISE: Advice(
        causes=(
            "the learning rate is too high, and training diverges slowly",
            "the data changed: another source, harder or longer samples",
        ),
        next_step=(
            "Resume from a checkpoint before the rise with a lower train.learning_rate;"
            " train.health.on_spike = 'rollback' does so automatically if the rise is"
            " sudden."
        ),
    ),
    Kind.STARVED: Advice(
        causes=(
            "too few DataLoader workers for the speed of the GPU",
            "slow storage, such as a shared file system under load",
            "other jobs use the CPU cores of that node",
        ),
        next_step=(
            "Find the number of DataLoader workers (train.data.num_workers): autotune"
            " workers PROFILE; on shared storage, stage the dataset on each node's"
            " local disk: --set train.data.stage_to='$TMPDIR'"
        ),
    ),
    Kind.STRAGGLER: Advice(
        causes=(
            "that GPU is throttled by heat or a power cap",
            "other processes use that GPU or the CPU cores of its node",
            "that GPU is a slower model than the others",
            "background services or the network slow down that node",
            (
                "uneven data: in layouts other than packed, some ranks get longer"
                " sequences"
            ),
        ),
        next_step=(
            "Run nvidia-smi -q -d PERFORMANCE on that rank's node; if it stays slow,"
            " exclude the node (SLURM: --exclude=NODE). If the slow rank varies, try"
            " train.layout = 'packed'."
        ),
    ),
}
"""Advice by kind of finding."""
