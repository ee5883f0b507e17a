"""Exports of profiles, for tests of exports."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from autotune.cli import run
from autotune.corpus.values import SequenceMeans
from autotune.subjects.mlm.export.table import Export
from autotune.subjects.mlm.export.targets import TargetName
from autotune.subjects.mlm.export.translate import export_profile
from testbed.examples.profiles import but, example_profile

PROGRAMS = Path(__file__).parent / "export_programs"
"""Programs that child processes run on exports."""


def means_of(*, non_padding_tokens: float, samples: float | None) -> SequenceMeans:
    """Return tokens and samples of a sequence, on average."""
    return SequenceMeans(
        non_padding_tokens=non_padding_tokens, samples=samples, source="a test"
    )


MEANS = means_of(non_padding_tokens=500.0, samples=2.0)
"""Tokens and samples of a sequence, unless a test has its own."""


def export_example(
    to: TargetName = "hf-trainer",
    *,
    ranks: int = 1,
    means: SequenceMeans = MEANS,
    evidence: dict[str, object] | None = None,
    **train: Any,
) -> Export:
    """Return an export of the example profile with other settings.

    Args:
        to: Target of the export.
        ranks: Ranks that train on one node.
        means: Tokens and samples of a sequence, on average.
        evidence: Evidence that replaces the example's, by command.
        train: Settings that replace the example's.
    """
    profile = but(example_profile(), train=train, evidence=evidence or {})
    return export_profile(profile, means, to, nodes=1, ranks_per_node=ranks)


def export_to(target: TargetName, profile: object, *options: str) -> None:
    """Export a profile by the command line, which must succeed.

    Args:
        target: Target of the export.
        profile: Path of the profile.
        options: Further options of the command.
    """
    assert run(["profile", "export", str(profile), "--to", target, *options]) == 0


def run_python(directory: Path, *arguments: str) -> Any:
    """Run Python in a directory; return the JSON value of its last line."""
    process = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        # Far above the time of importing torch and the libraries: ends a hang only.
        timeout=300,
        cwd=directory,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])
