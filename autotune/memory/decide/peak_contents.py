"""Contents of memory at its peak, from a log of all allocations of a step.

The kind of an allocation follows from what was seen to own it, such as an optimizer, or
else from its life: what forward makes and backward still finds is kept for backward.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from autotune.evidence.peak_contents import (
    NO_MODULE,
    ContentKind,
    LargeAllocation,
    ModuleContents,
    PeakContents,
    Phase,
    RefusedAllocation,
)
from autotune.memory.decide.module_groups import group_modules

MAX_ROWS = 24
"""Most modules, or groups of them, that are listed."""
MAX_LARGEST = 12
"""Most of the largest allocations that are listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Position in the computation of a step."""

    phase: Phase
    module: str = NO_MODULE
    """Qualified name of the innermost module that is being computed."""
    operator: str | None = None
    """Innermost operator that computes something; None outside of operators."""
    operator_call: int = -1
    """Number of the outermost operator's call; -1 outside of operators."""
    is_recomputation: bool = False
    """True if backward calls the module to compute its activations again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """A tensor that was seen at an address."""

    kind: ContentKind | None = None
    """Purpose of the tensor; None if only its shape is known."""
    module: str | None = None
    """Module that owns the tensor; None leaves it with the one that allocated it."""
    shape: tuple[int, ...] | None = None
    """Shape; None if the tensor is only a part of the allocation."""
    dtype: str | None = None
    """Type of the elements; None without a shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocated:
    """An allocation."""

    address: int
    size_bytes: int
    position: Position
    total_bytes: int | None = None
    """Memory that the allocator has given out, this included; None if unknown."""
    reserved_bytes: int | None = None
    """Memory that the allocator holds; None if it keeps none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """A release of memory; nothing happens if nothing is allocated at the address."""

    address: int
    total_bytes: int | None = None
    reserved_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelled:
    """A tensor seen at an address, which tells what the allocation there is."""

    address: int
    label: Label


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBegan:
    """The beginning of a step; what comes before the last one is not searched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnded:
    """The end of a step; what follows is not searched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardReached:
    """A point at which backward begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputationEnded:
    """A point in backward at which activations have been computed again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """An allocation that ran out of memory."""

    position: Position
    input_shapes: tuple[tuple[int, ...], ...] = ()
    """Shapes of the tensors of its operator."""


Event = (
    Allocated
    | Released
    | Labelled
    | StepBegan
    | StepEnded
    | BackwardReached
    | RecomputationEnded
    | Refused
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Memory that is allocated before the log begins."""

    size_bytes: int
    label: Label = Label(kind=ContentKind.OTHER)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLog:
    """All allocations and releases on one device, in their order.

    The step that is explained is the last one that began; without ``StepBegan``, it is
    the whole log.
    """

    held: Mapping[int, Held]
    """Memory that is allocated before the log begins, by address."""
    events: Sequence[Event]
    classes: Mapping[str, str] = field(default_factory=dict)
    """Class of each module of the model, by qualified name."""
    ran_out_of_memory: bool = False
    """True if the step ended because an allocation was refused."""
    refused_bytes: int | None = None
    """Size of that allocation; None if it is not known."""
    is_compiled: bool = False
    """True if compiled code ran."""


@dataclass(slots=True, kw_only=True)
class _Block:
    """An allocation with its life, in positions of the log."""

    size_bytes: int
    position: Position | None
    """Position in the step that made it; None if it existed before."""
    born: int
    died: int
    """Position of its release; that after the end of the log if it is not released."""
    label: Label

    def add_label(self, label: Label) -> None:
        """Add what a tensor tells: owners that are seen first count, later shapes."""
        known = self.label
        is_owned = known.kind not in (None, ContentKind.OTHER)
        owner = known if is_owned else label
        shape = label if label.shape is not None else known
        self.label = Label(
            kind=owner.kind or known.kind,
            module=owner.module or known.module,
            shape=shape.shape,
            dtype=shape.dtype,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Peak:
    """The moment that is explained."""

    at: int
    """Position in the log."""
    total_bytes: int
    reserved_bytes: int | None
    position: Position
    step_from: int
    """Position in the log at which the step begins."""
    is_refusal: bool = False
    """True if an allocation was refused at this moment."""


def contents_at_peak(log: StepLog, device: str) -> PeakContents:
    """Return what memory consisted of at its peak, or when it ran out.

    Args:
        log: Allocations of a step.
        device: Type of the device: ``cpu`` or ``cuda``.
    """
    blocks = _blocks_of(log)
    peak = _peak_of(log)
    backward = _positions_of(log, BackwardReached)
    recomputed = _positions_of(log, RecomputationEnded)
    alive = [block for block in blocks if block.born <= peak.at < block.died]
    kinds = [_kind_of(block, peak, backward, recomputed) for block in alive]
    bytes_by_module: dict[str, dict[ContentKind, int]] = {}
    for block, kind in zip(alive, kinds, strict=True):
        sizes = bytes_by_module.setdefault(_module_of(block), {})
        sizes[kind] = sizes.get(kind, 0) + block.size_bytes
    rows = [
        ModuleContents(
            module=group.title,
            bytes_by_kind={
                kind: group.bytes_by_kind[kind]
                for kind in ContentKind
                if group.bytes_by_kind.get(kind)
            },
        )
        for group in group_modules(bytes_by_module, log.classes, MAX_ROWS)
    ]
    attributed_bytes = sum(block.size_bytes for block in alive)
    largest = sorted(
        zip(alive, kinds, strict=True), key=lambda pair: -pair[0].size_bytes
    )
    return PeakContents(
        device="cuda" if device == "cuda" else "cpu",
        peak_bytes=peak.total_bytes,
        reserved_bytes=peak.reserved_bytes,
        phase=peak.position.phase,
        module=peak.position.module,
        operator=peak.position.operator,
        rows=rows,
        not_attributed_bytes=max(0, peak.total_bytes - attributed_bytes),
        missed_releases_bytes=max(0, attributed_bytes - peak.total_bytes),
        largest=[_large(block, kind, peak) for block, kind in largest[:MAX_LARGEST]],
        refused=_refused_of(log, peak) if log.ran_out_of_memory else None,
        is_compiled=log.is_compiled,
    )


def _blocks_of(log: StepLog) -> list[_Block]:
    """Return all allocations of the log, and what was allocated before."""
    end = len(log.events)
    live = {
        address: _Block(
            size_bytes=held.size_bytes,
            position=None,
            born=-1,
            died=end,
            label=held.label,
        )
        for address, held in log.held.items()
        if held.size_bytes
    }
    blocks = list(live.values())
    for number, event in enumerate(log.events):
        if isinstance(event, Allocated):
            # A release that was not seen: nothing is allocated twice.
            _end(live, event.address, number)
            block = _Block(
                size_bytes=event.size_bytes,
                position=event.position,
                born=number,
                died=end,
                label=Label(),
            )
            live[event.address] = block
            blocks.append(block)
        elif isinstance(event, Released):
            _end(live, event.address, number)
        elif isinstance(event, Labelled) and event.address in live:
            live[event.address].add_label(event.label)
    return blocks


def _end(live: dict[int, _Block], address: int, number: int) -> None:
    """End the life of the allocation at an address, if there is one."""
    block = live.pop(address, None)
    if block is not None:
        block.died = number


def _peak_of(log: StepLog) -> _Peak:
    """Return the moment with the most memory, or at which it ran out."""
    refusals = _positions_of(log, Refused) if log.ran_out_of_memory else []
    last_refusal = refusals[-1] if refusals else None
    began = _positions_of(log, StepBegan)
    step_from = began[-1] if began else -1
    live = {address: held.size_bytes for address, held in log.held.items()}
    total_bytes = sum(live.values())
    reserved_bytes: int | None = None
    peak = _Peak(
        at=-1,
        total_bytes=total_bytes,
        reserved_bytes=None,
        position=Position(phase="other"),
        step_from=step_from,
    )
    for number, event in enumerate(log.events):
        if isinstance(event, Allocated | Released):
            total_bytes -= live.pop(event.address, 0)
            if isinstance(event, Allocated):
                live[event.address] = event.size_bytes
                total_bytes += event.size_bytes
            if event.reserved_bytes is not None:
                reserved_bytes = event.reserved_bytes
            if event.total_bytes is not None:
                total_bytes = event.total_bytes
        if number == step_from:
            peak = replace(
                peak, at=number, total_bytes=total_bytes, reserved_bytes=reserved_bytes
            )
        is_refusal = number == last_refusal
        is_higher = (
            number > step_from
            and isinstance(event, Allocated)
            and total_bytes > peak.total_bytes
        )
        if isinstance(event, Allocated | Refused) and (is_higher or is_refusal):
            peak = _Peak(
                at=number,
                total_bytes=total_bytes,
                reserved_bytes=reserved_bytes,
                position=event.position,
                step_from=step_from,
                is_refusal=is_refusal,
            )
        # After a refusal, everything is released.
        if is_refusal or (number > step_from and isinstance(event, StepEnded)):
            break
    return peak


def _positions_of(log: StepLog, kind: type[Event]) -> list[int]:
    """Return the positions of all events of a type."""
    return [
        number for number, event in enumerate(log.events) if isinstance(event, kind)
    ]


def _kind_of(
    block: _Block, peak: _Peak, backward: Sequence[int], recomputed: Sequence[int]
) -> ContentKind:
    """Return the kind of an allocation.

    Args:
        block: An allocation that exists at the peak.
        peak: The peak.
        backward: Positions in the log at which backward begins, ascending.
        recomputed: Positions at which activations have been computed again, ascending.
    """
    position = block.position
    if block.label.kind is not None:
        return block.label.kind
    if position is None or block.born <= peak.step_from:
        return ContentKind.OTHER
    is_backward = position.phase == "backward"
    if position.phase == "optimizer step" or (
        is_backward and not position.is_recomputation
    ):
        return ContentKind.TEMPORARIES
    ends = recomputed if is_backward else backward
    later = bisect_right(ends, block.born)
    if later < len(ends):
        is_kept = block.died > ends[later]
    else:
        # Out of memory before backward: it may need all results of operators that
        # ended. Otherwise, no backward follows.
        is_kept = (
            peak.is_refusal
            and not is_backward
            and position.operator_call != peak.position.operator_call
        )
    if not is_kept:
        return ContentKind.TEMPORARIES
    if position.phase == "other":
        return ContentKind.INPUTS
    return ContentKind.ACTIVATIONS


def _module_of(block: _Block) -> str:
    """Return the module that owns an allocation, or else the one that made it."""
    if block.label.module is not None:
        return block.label.module
    return NO_MODULE if block.position is None else block.position.module


def _large(block: _Block, kind: ContentKind, peak: _Peak) -> LargeAllocation:
    """Return an allocation as evidence."""
    label = block.label
    position = block.position
    is_of_step = block.born > peak.step_from
    return LargeAllocation(
        size_bytes=block.size_bytes,
        kind=kind,
        module=_module_of(block),
        operator=None if position is None else position.operator,
        shape=None if label.shape is None else list(label.shape),
        dtype=label.dtype,
        phase=position.phase if position is not None and is_of_step else None,
    )


def _refused_of(log: StepLog, peak: _Peak) -> RefusedAllocation:
    """Return the allocation that ran out of memory."""
    input_shapes: list[list[int]] = []
    if 0 <= peak.at < len(log.events):
        event = log.events[peak.at]
        if isinstance(event, Refused):
            input_shapes = [list(shape) for shape in event.input_shapes]
    return RefusedAllocation(
        size_bytes=log.refused_bytes,
        module=peak.position.module,
        operator=peak.position.operator,
        input_shapes=input_shapes,
    )
