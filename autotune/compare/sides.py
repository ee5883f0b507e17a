"""Comparison of two paths: reads each as a side, and compares them.

Each kind of side has its own module: ``profile_side``, ``run_side`` and
``tuning_side``; a dataset is small enough to be here.
"""

from pathlib import Path

from autotune.advice.read_context import read_measured_run
from autotune.base.estimates import estimate_single
from autotune.compare import decide
from autotune.compare.decide import Comparison, Measurement, Side, compare
from autotune.compare.profile_side import profile_side
from autotune.compare.run_side import compare_losses, run_side
from autotune.compare.tuning_side import tuning_side
from autotune.errors import BadInput, UsageError
from autotune.profiles.store import read_profile
from autotune.trials.trial_log import TRIAL_LOG_DIRECTORY
from trainer.formats.manifest import MANIFEST_NAME, Manifest, read_manifest
from trainer.formats.nested_tables import flatten_table
from trainer.formats.run_record import RUN_FILE, Run


def compare_paths(a: Path, b: Path) -> Comparison:
    """Compare two profiles, tunings, runs or datasets, or a profile with a run.

    Raises:
        AutotuneError: If a side cannot be read, or the two cannot be compared.
    """
    side_a, run_a = _read_side(a)
    side_b, run_b = _read_side(b)
    kinds = {side_a.kind, side_b.kind}
    if len(kinds) > 1 and kinds != {"profile", "run"}:
        raise UsageError(
            f"{a} is a {side_a.kind} and {b} is a {side_b.kind}: no figures in common",
            next_step="Compare two of a kind, or a profile with a run.",
        )
    losses = None
    if run_a is not None and run_b is not None:
        losses = compare_losses(run_a, run_b)
    return compare(side_a, side_b, losses)


def _read_side(path: Path) -> tuple[Side, Run | None]:
    """Return the side at a path, and the run if it is one.

    Raises:
        BadInput: If a directory is of no kind that can be compared.
    """
    if (path / RUN_FILE).is_file():
        run = read_measured_run(path)
        return run_side(run, str(path)), run
    if (path / TRIAL_LOG_DIRECTORY).is_dir():
        return tuning_side(path), None
    if (path / MANIFEST_NAME).is_file():
        return _dataset_side(read_manifest(path), str(path)), None
    if path.is_dir():
        raise BadInput(
            f"{path} is neither a run (it has no {RUN_FILE}), a tuning (no"
            f" {TRIAL_LOG_DIRECTORY}/) nor a dataset (no {MANIFEST_NAME})",
            next_step="Name a profile, a run, a tuning or a dataset.",
        )
    return profile_side(read_profile(path), str(path)), None


def _dataset_side(manifest: Manifest, name: str) -> Side:
    """Return the counts of a dataset's splits; empty splits have none."""
    measurements = []
    for split_name, split in (
        ("training", manifest.train),
        ("validation", manifest.validation),
    ):
        for metric, count in (
            (decide.SAMPLES, split.samples),
            (decide.TOKENS, split.tokens),
        ):
            if count:
                measurements.append(
                    Measurement(
                        metric=metric,
                        of=split_name,
                        estimate=estimate_single(count),
                        exact=True,
                    )
                )
    settings = manifest.model_dump(mode="json", exclude={"train", "validation"})
    return Side(
        kind="dataset",
        name=name,
        circumstances={"dataset": manifest.dataset_hash},
        facts={},
        measurements=tuple(measurements),
        settings=flatten_table(settings),
    )
