"""The committed files that hold figures, as they were written."""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.quotes import GpuQuotes
from benchmarks.gpu.results import CHECK_NAME

FIRST_H100_RUNS = "reports/gpu/h100-80gb-hbm3/2026-11-26"
CURRENT_H100_RUNS = "reports/gpu/h100-80gb-hbm3/2026-11-27"

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedFigures:
    """All recorded figures, as their JSON and TOML files hold them."""

    benchmarks: Mapping[str, Json]
    """Each file of ``reports/benchmarks``, by the name of its benchmark."""
    faults: Json
    demo_profile: Json
    first_h100_check: Json
    first_h100_profile: Json
    first_h100_steps: Json
    current_h100_check: Json
    current_h100_trials: Json
    gpu: GpuQuotes

    @property
    def bars(self) -> list[Json]:
        """All figures that have a target."""
        return [bar for content in self.benchmarks.values() for bar in content["bars"]]


def read_recorded_figures(root: Path) -> RecordedFigures:
    """Read all committed files that hold figures.

    Args:
        root: Root of the repository.
    """
    first, current = root / FIRST_H100_RUNS, root / CURRENT_H100_RUNS
    benchmarks = sorted((root / "reports" / "benchmarks").glob("*.json"))
    return RecordedFigures(
        benchmarks={path.stem: _json(path) for path in benchmarks},
        faults=_json(root / "reports" / "faults.json"),
        demo_profile=_toml(root / "profiles" / "bert-mini-cpu.toml"),
        first_h100_check=_json(first / CHECK_NAME),
        first_h100_profile=_toml(first / "profiles" / "bert-120m.toml"),
        first_h100_steps=_json(first / "steps.json"),
        current_h100_check=_json(current / CHECK_NAME),
        current_h100_trials=_json(current / "trials.json"),
        gpu=GpuQuotes(root / "reports" / "gpu"),
    )


def _json(path: Path) -> Any:
    return json.loads(path.read_text())


def _toml(path: Path) -> Any:
    return tomllib.loads(path.read_text())
