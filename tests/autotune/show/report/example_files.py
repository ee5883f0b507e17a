"""The made-up tuning of ``tests.autotune.show.report.example`` on disk, as commands leave a real one."""

import json
from dataclasses import asdict
from pathlib import Path

from autotune.core.profile import profile_to_toml
from autotune.store import Ledger
from tests.autotune.show.report.example import example_manifest, example_profile, example_run, example_trials
from trainer.record import Run


def write_example(directory: Path, trials: int) -> tuple[Path, Path, Path]:
    """Write it; returns the profile, the directory of reports, and the run."""
    manifest = example_manifest()
    (directory / "data").mkdir(parents=True)
    (directory / "data" / "manifest.json").write_text(json.dumps(manifest.model_dump(mode="json")))
    profile = directory / "bert-120m-h100-nvl.toml"
    profile.write_text(profile_to_toml(example_profile(manifest.dataset_hash)))
    reports, run = directory / "reports", directory / "runs" / "20261122T034808Z"
    _write_ledger(reports / profile.stem / "ledger", trials)
    _write_run(run, example_run(run, "0" * 64, manifest.dataset_hash))
    return profile, reports, run


def _write_ledger(directory: Path, trials: int) -> None:
    ledger = Ledger(directory, "example")
    for number, done in enumerate(example_trials(trials)):
        ledger.append(
            {
                "time_utc": f"2026-11-22T00:00:00.{number:06}Z", "site": "s", "key": done.trial.key, "job": "step",
                "measured": done.trial.measured, "label": done.label, "outcome": asdict(done.outcome),
                "seconds": done.seconds,
            }
        )  # fmt: skip


def _write_run(directory: Path, run: Run) -> None:
    directory.mkdir(parents=True)
    tables = {"run.json": run.header, "startup.json": run.startup, "exit.json": run.end}
    for name, table in tables.items():
        assert table is not None
        (directory / name).write_text(json.dumps(table.model_dump(mode="json")))
    lists = {"steps.jsonl": run.steps, "evaluations.jsonl": run.evaluations, "events.jsonl": run.events}
    for name, rows in lists.items():
        (directory / name).write_text("".join(row.model_dump_json() + "\n" for row in rows))
