"""The made-up tuning of ``testbed.examples.tuning`` on disk, as commands leave a
real one."""

import json
from dataclasses import asdict
from pathlib import Path

from autotune.profiles.toml_file import profile_to_toml
from autotune.trials.trial_log import TrialLog
from testbed.examples.tuning import (
    example_manifest,
    example_profile,
    example_run,
    example_trials,
)


def write_example(directory: Path, trials: int) -> tuple[Path, Path, Path]:
    """Write it; returns the profile, the directory of reports, and the run."""
    manifest = example_manifest()
    profile = directory / "bert-120m-h100-nvl.toml"
    reports, place = directory / "reports", directory / "runs" / "20261122T034808Z"
    run = example_run(place, "0" * 64, manifest.dataset_hash)
    (directory / "data").mkdir(parents=True)
    place.mkdir(parents=True)
    profile.write_text(profile_to_toml(example_profile(manifest.dataset_hash)))
    trial_log = TrialLog(reports / profile.stem / "trials", "example")
    for number, done in enumerate(example_trials(trials)):
        trial_log.append(
            {
                "time_utc": f"2026-11-22T00:00:00.{number:06}Z",
                "site": "s",
                "key": done.trial.key,
                "job": "step",
                "measured": done.trial.measured,
                "label": done.label,
                "outcome": asdict(done.outcome),
                "seconds": done.seconds,
            }
        )
    assert run.startup is not None
    assert run.end is not None
    written = {
        directory / "data" / "manifest.json": [manifest],
        place / "run.json": [run.header],
        place / "startup.json": [run.startup],
        place / "exit.json": [run.end],
        place / "steps.jsonl": run.steps,
        place / "evaluations.jsonl": run.evaluations,
        place / "events.jsonl": run.events,
    }
    for path, models in written.items():
        path.write_text(
            "".join(json.dumps(one.model_dump(mode="json")) + "\n" for one in models)
        )
    return profile, reports, place
