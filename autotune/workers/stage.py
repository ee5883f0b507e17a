"""Sweep of DataLoader workers, and the joint search if no number suffices."""

import sys
from pathlib import Path
from typing import Any

from autotune.errors import BadInput, OutOfTime
from autotune.evidence.workers import WorkersEvidence
from autotune.machine.measured_device import MeasuredDevice
from autotune.subjects.bench import SubjectBench
from autotune.trials.runner import TrialRunner
from autotune.workers.joint_search import gap_remains, search_joint
from autotune.workers.measure import WorkerSweep
from autotune.workers.windows import SubjectWindows
from autotune.workers.workers_evidence import workers_evidence

EXPECTED_TRIALS = 24
"""Usual number of windows of a sweep, for the progress display."""


def sweep_on(
    bench: SubjectBench, windows: SubjectWindows[Any], path: Path
) -> tuple[WorkersEvidence, TrialRunner]:
    """Find the fewest workers on an open bench.

    The trials are in the trial log of the profile at ``path``. Errors are those of
    ``sweep_workers``.
    """
    loader = bench.subject.code().get("loader", bench.subject.words)
    with bench.tuning(
        f"workers {loader}",
        path,
        bench.fingerprint,
        windows.request,
        EXPECTED_TRIALS,
    ) as runner:
        evidence = sweep_workers(windows, runner, bench.site, f"{path.stem}: workers")
    return evidence, runner


def sweep_workers(
    windows: SubjectWindows[Any],
    runner: TrialRunner,
    site: MeasuredDevice,
    study_name: str,
) -> WorkersEvidence:
    """Find the smallest sufficient number of workers of a subject's loader.

    If none is sufficient, the settings that its loader takes are searched with it.

    Args:
        windows: Windows of the subject, with their time budget.
        runner: Runner of the windows, with their trial log.
        site: The measured machine.
        study_name: Name of the Optuna study of the sweep.

    Raises:
        OutOfTime: If the deadline leaves no time for the first three rounds.
        BadInput: If your code failed in a window of the sweep.
        Undecided: If a window failed.
    """
    warning = windows.limits.warning()
    if warning is not None:
        sys.stderr.write(f"warning: {warning}\n")
    sweep = WorkerSweep(windows=windows, runner=runner, study_name=study_name)
    choice = sweep.run()
    joint = None
    if gap_remains(choice) and not sweep.time_is_over:
        try:
            joint = search_joint(sweep, choice)
        except OutOfTime:
            # The runner raises this before a window that would likely end after the
            # deadline. The choice of the sweep then stands.
            pass
        except BadInput as error:
            # The loader ran with as many workers, and failed with another setting.
            varied = " and ".join(sorted(windows.searched))
            sys.stderr.write(
                f"warning: the search of {varied} ended early: {error.message}\n"
            )
    evidence = workers_evidence(sweep, choice, site)
    if joint is None:
        return evidence
    finding = evidence.utilisation_finding
    if joint.adopted:
        # It is of other loader settings than those that were adopted.
        finding = None
    return evidence.model_copy(update={"joint": joint, "utilisation_finding": finding})
