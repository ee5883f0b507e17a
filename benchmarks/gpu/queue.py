"""Order of the queue, and reasons for leaving stages out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autotune.base.tables import text_table
from autotune.base.units import format_bytes, format_seconds
from autotune.errors import UsageError
from benchmarks.gpu.results import CUT_OFF, ENDED, FAILED, Known
from benchmarks.gpu.stage import Stage, fill


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMachine:
    """The GPUs that stages run on."""

    name: str
    """Short name of the GPU."""
    gpus: int
    memory_bytes: int
    """Memory of each GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A stage that does not run in this call."""

    stage: Stage
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """Stages in order, with what is known of them."""

    stages: Sequence[Stage]
    """All stages, the most valuable first."""
    chosen: Sequence[Stage]
    """Stages that may run; references of others run as well."""
    known: Mapping[str, Known]
    libraries: Mapping[str, str | None]
    """Dataset and versions of the machine; None is not compared."""

    def is_done(self, stage: Stage) -> bool:
        """Return whether its result is known, and would be measured the same again.

        A training is repeated with its profile: it shows what that one delivers.
        """
        known = self.known.get(stage.name)
        if known is None or known.status != ENDED:
            return False
        writer = self._writer(stage)
        if stage.is_training and writer is not None:
            written = self.known.get(writer.name)
            is_older = (
                written is not None
                and written.result["began_utc"] > known.result["began_utc"]
            )
            if is_older or not self.is_done(writer):
                return False
        return known.is_of(stage, self.libraries)

    def waiting(self) -> list[Stage]:
        """Return the stages to run, in order.

        Stages without a result are first, then those whose result is of other code or
        libraries, and at last those that failed and would fail again.
        """
        waiting = [
            stage
            for stage in self.chosen
            if stage.every_call or not self.is_done(stage)
        ]
        return sorted(waiting, key=self._rank)

    def _rank(self, stage: Stage) -> int:
        """Return 0 for stages without a result, and for those that read theirs."""
        known = self.known.get(stage.name)
        if stage.every_call or known is None or known.status == CUT_OFF:
            return 0
        writer = self._writer(stage)
        if writer is not None and not self.is_done(writer):
            return self._rank(writer)
        if known.status == ENDED:
            return 1
        return 2 if known.is_of(stage, self.libraries) else 0

    def _writer(self, stage: Stage) -> Stage | None:
        """Return the stage that writes what a stage reads, or None."""
        if stage.reads is None:
            return None
        return next(
            (writer for writer in self.stages if writer.writes == stage.reads), None
        )

    def status(self, stage: Stage, memory_bytes: int | None = None) -> str:
        """Return the status of a stage, for the list.

        Args:
            stage: The stage.
            memory_bytes: Memory of the GPU; None if it is not known.
        """
        if stage.unavailable:
            return f"unavailable: {stage.unavailable}"
        if memory_bytes is not None and memory_bytes < stage.least_memory_bytes:
            return "needs more memory"
        if stage.every_call:
            return "in every call"
        known = self.known.get(stage.name)
        if known is None:
            return "waiting"
        if known.status == CUT_OFF:
            return f"cut off on {known.date}, continues"
        if known.status == FAILED:
            return f"failed on {known.date}"
        if self.is_done(stage):
            return f"done on {known.date}"
        return f"waiting (done on {known.date} with another command, code or library)"

    def walk(
        self,
        machine: GpuMachine,
        *,
        left_s: Callable[[], float],
        exists: Callable[[str], bool],
        run: Callable[[Stage], bool],
    ) -> list[LeftOut]:
        """Run each waiting stage that can run now.

        Args:
            machine: The GPUs.
            left_s: Function that returns the remaining time in seconds.
            exists: Function that returns whether a stage's input is there.
            run: Function that runs a stage, and returns whether it ended.

        Returns:
            The stages that did not run.
        """
        by_name = {stage.name: stage for stage in self.stages}
        ended: dict[str, bool] = {}
        left_out = []
        for stage in self.waiting():
            if stage.name in ended:
                continue
            parts = [stage]
            if stage.reference is not None and not ended.get(stage.reference):
                parts.insert(0, by_name[stage.reference])
            reason = reason_against(stage, machine)
            for part in parts:
                reason = reason or self._reason_now(part, machine, exists, ended)
            least_s = sum(part.least_s for part in parts)
            if reason is None and left_s() < least_s:
                reason = f"no time: takes at least {format_seconds(least_s)}"
            if reason is not None:
                left_out.append(LeftOut(stage=stage, reason=reason))
                continue
            for part in parts:
                ended[part.name] = run(part)
                if not ended[part.name]:
                    break
        return [left for left in left_out if left.stage.name not in ended]

    def _reason_now(
        self,
        stage: Stage,
        machine: GpuMachine,
        exists: Callable[[str], bool],
        ended: Mapping[str, bool],
    ) -> str | None:
        """Return why a stage cannot run at this moment, or None."""
        if ended.get(stage.name) is False:
            return f"{stage.name} failed in this call"
        if stage.reads is None:
            return None
        path = fill(stage.reads, gpu=machine.name)
        if exists(path):
            return None
        writer = self._writer(stage)
        return f"needs {path}" + (f" from {writer.name}" if writer else "")


def reason_against(stage: Stage, machine: GpuMachine) -> str | None:
    """Return why a stage cannot run on a machine at all, or None."""
    if stage.unavailable:
        return stage.unavailable
    if stage.gpus > machine.gpus:
        return f"needs {stage.gpus} GPUs"
    if stage.least_memory_bytes > machine.memory_bytes:
        return (
            f"needs a GPU with {stage.gpu_words}: this one has"
            f" {format_bytes(machine.memory_bytes)}"
        )
    missing = stage.missing_module()
    return f"{missing} is not installed" if missing else None


def select(stages: Sequence[Stage], only: str) -> list[Stage]:
    """Return all stages, or those with these names or prefixes.

    Stages of every call are always among them.

    Args:
        stages: The queue.
        only: Names or prefixes, with commas between; empty for all.

    Raises:
        UsageError: If a name matches none.
    """
    names = {stage.name for stage in stages}
    wanted = tuple(prefix for prefix in only.split(",") if prefix)
    for prefix in wanted:
        if not any(name.startswith(prefix) for name in names):
            raise UsageError(
                f"stage {prefix!r} not found",
                next_step=f"Choose from {', '.join(sorted(names))}.",
            )
    if not wanted:
        return list(stages)
    beginnings = tuple(prefix for prefix in wanted if prefix not in names)
    return [
        stage
        for stage in stages
        if stage.every_call or stage.name in wanted or stage.name.startswith(beginnings)
    ]


def plan(
    queue: Queue, machine: GpuMachine, seconds: float, exists: Callable[[str], bool]
) -> tuple[list[Stage], list[LeftOut]]:
    """Return the stages that will run if each takes its longest, and the others."""
    planned: list[Stage] = []
    spent_s = 0.0

    def run(stage: Stage) -> bool:
        nonlocal spent_s
        planned.append(stage)
        spent_s += stage.most_s
        return True

    def will_exist(path: str) -> bool:
        writes = {
            fill(stage.writes, gpu=machine.name) for stage in planned if stage.writes
        }
        return path in writes or exists(path)

    left_out = queue.walk(
        machine, left_s=lambda: seconds - spent_s, exists=will_exist, run=run
    )
    return planned, left_out


def plan_text(planned: Sequence[Stage], left_out: Sequence[LeftOut]) -> str:
    """Return what will run, and what is left out and why."""
    rows = [
        [stage.name, f"{stage.least_s:.0f} to {stage.most_s:.0f} s"]
        for stage in planned
    ]
    blocks = ["Next, if each stage takes its longest:", text_table(["", "time"], rows)]
    return "\n".join([*blocks, left_out_text(left_out)])


def left_out_text(left_out: Sequence[LeftOut]) -> str:
    """Return the stages that are left out, with the reasons."""
    if not left_out:
        return ""
    rows = [[left.stage.name, left.reason] for left in left_out]
    return "\n".join(["Left out:", text_table(["", "reason"], rows)])


def list_text(
    queues: Mapping[str, Queue], memory_bytes_by_gpu: Mapping[str, int]
) -> str:
    """Return the queue with the status of each stage on each kind of GPU.

    Args:
        queues: What is known of the queue, by kind of GPU.
        memory_bytes_by_gpu: Memory of those kinds whose memory is known.
    """
    first = next(iter(queues.values()))
    head = ["stage", "GPU", "seconds", "needs", *queues]
    rows = []
    for stage in first.chosen:
        needs = [name for name in (stage.reads, stage.reference) if name]
        rows.append(
            [
                stage.name,
                stage.gpu_words,
                f"{stage.least_s:.0f} to {stage.most_s:.0f}",
                ", ".join(needs) or "-",
                *(
                    queue.status(stage, memory_bytes_by_gpu.get(gpu))
                    for gpu, queue in queues.items()
                ),
            ]
        )
    return text_table(head, rows)
