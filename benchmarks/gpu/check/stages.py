"""Stages, each in its own time box: one that fails or hangs is recorded, and the next one goes on."""

import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from autotune.core.hardware import is_pretended
from autotune.core.units import format_seconds
from benchmarks.gpu.check.results import NO_TIME, Sheet, StageResult
from benchmarks.gpu.check.rig import NoTimeLeft, Rig, TimeBox, TrialFailed

HANG_ALLOWANCE_S = 5.0
"""A stage ends its trials by itself when its time is over; one that has not returned so much later hangs."""
_TAIL_LINES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One row of the check."""

    name: str
    measure: Callable[[Rig, Sheet, TimeBox], None]
    weight: float
    """Its part of the time that is left when it begins, among the stages from it on: what one leaves, the next have."""
    least_s: float
    """Less time than this is not worth a start, with full sizes."""
    ranks: int = 1
    """That it needs: a stage of two is left out unless two were asked for."""


class Hung(Exception):
    """A stage did not return."""


def box_s(stages: tuple[Stage, ...], number: int, left_s: float, *, least_share: float = 1.0) -> float:
    """Seconds for the stage of that number out of those that are left.

    Time that is too short for all later stages is not spread so thin that it is enough for none: the last ones, which
    are worth the least, go without, unless others leave them theirs.
    """
    sharing = list(stages[number:])
    while len(sharing) > 1:
        whole = sum(stage.weight for stage in sharing)
        if all(left_s * stage.weight / whole >= least_share * stage.least_s for stage in sharing):
            break
        sharing.pop()
    return left_s * sharing[0].weight / sum(stage.weight for stage in sharing)


def run_stage(stage: Stage, rig: Rig, seconds: float, *, least_share: float = 1.0) -> StageResult:
    """Run one stage for at most so many seconds.

    Returns:
        What it measured; or what it had measured when it failed, ran out of time, or hung, and why.
    """
    least_s = least_share * stage.least_s
    if seconds < least_s:
        reason = f"{NO_TIME}: it takes {format_seconds(least_s)} at least"
        return StageResult(name=stage.name, status="not measured", box_s=seconds, reason=reason)
    sheet = Sheet(pretended=rig.site.gpu is not None and is_pretended(rig.site.gpu.driver))
    started_s, now_utc = rig.clock.monotonic_s(), rig.clock.utc_now().isoformat()
    error = _bounded(stage, rig, sheet, TimeBox(clock=rig.clock, end_s=started_s + seconds), seconds)
    if isinstance(error, Hung):
        rig.replace_machine()
    failed = error is not None and not isinstance(error, NoTimeLeft)
    return StageResult(
        name=stage.name,
        status="measured" if error is None else "failed" if failed else "not measured",
        measured_utc=now_utc,
        seconds=round(rig.clock.monotonic_s() - started_s, 3),
        box_s=round(seconds, 3),
        figures=tuple(sheet.figures),
        details=dict(sheet.details),
        made_with=rig.made_with,
        reason=None if error is None else _without_places(_message(error)),
        traceback_tail=_traceback_tail(error) if failed and error is not None else None,
    )


def _bounded(stage: Stage, rig: Rig, sheet: Sheet, box: TimeBox, seconds: float) -> Exception | None:
    """Run it in a thread of its own: a driver's call may never return, and the check must."""
    errors: list[Exception] = []

    def work() -> None:
        try:
            stage.measure(rig, sheet, box)
        except Exception as error:  # noqa: BLE001 - one stage's failure, of whatever kind, must not cost the others
            errors.append(error)

    thread = threading.Thread(target=work, name=f"stage-{stage.name}", daemon=True)
    thread.start()
    thread.join(seconds + HANG_ALLOWANCE_S)
    if thread.is_alive():
        return Hung(f"it did not return within {seconds + HANG_ALLOWANCE_S:.0f} s")
    return errors[0] if errors else None


def _message(error: Exception) -> str:
    text = str(error) or "no message"
    return text if isinstance(error, NoTimeLeft | TrialFailed | Hung) else f"{type(error).__name__}: {text}"


def _traceback_tail(error: Exception) -> str:
    text = _without_places("".join(traceback.format_exception(error)))
    return "\n".join(text.splitlines()[-_TAIL_LINES:])


def _without_places(text: str) -> str:
    """Results are passed on, so where this checkout and this Python lie is left out of them."""
    for directory, name in ((Path(__file__).parents[3], ""), (Path(sys.prefix), "python/"), (Path.home(), "~/")):
        if len(directory.parts) > 1:
            text = text.replace(f"{directory}/", name)
    return text
