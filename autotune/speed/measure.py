"""Constants of this machine.

A trial measures them, a file per device keeps them, and predictions read them.
"""

import re
from pathlib import Path
from typing import Literal

from autotune.base.files import write_atomically
from autotune.errors import MachineLacks, Undecided
from autotune.speed.decide import data_sheet_rates
from autotune.speed.values import MachineRates, RatesRequest
from autotune.trials.outcomes import Measured, describe
from autotune.trials.trial_machine import Machine
from trainer.formats.tables import parse_table, read_json

DIRECTORY = Path("reports/machines")
TIMEOUT_S = 300.0
MOST_SPREAD = 1.2
"""Largest ratio of medians to shortest times; an idle machine stays below 1.1."""
MEASURED_RANGE_SHARE = 0.15
"""Share by which predictions from measured constants may be off;
``docs/benchmarks.md``."""


def rates_path(device: str, directory: Path = DIRECTORY) -> Path:
    """Return the file of a device's measured constants."""
    return directory / f"{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}.json"


def known_rates(device: str, directory: Path = DIRECTORY) -> MachineRates | None:
    """Return a device's measured constants, or a GPU's from its data sheet.

    Returns:
        The constants, or None if there are none.

    Raises:
        BadConfig: If the file is damaged.
    """
    path, sheet = rates_path(device, directory), data_sheet_rates(device)
    if path.exists():
        rates = parse_table(
            MachineRates, read_json(path, max_bytes=2**20), where=str(path)
        )
        return rates.model_copy(
            update={"matmul": (sheet.matmul if sheet else {}) | rates.matmul}
        )
    return sheet


def measure_rates(
    machine: Machine, kind: Literal["cpu", "cuda"], device: str, *, when_utc: str
) -> MachineRates:
    """Measure this machine's constants, which takes a minute.

    Raises:
        MachineLacks: If the measurement fails.
        Undecided: If the machine is busy.
    """
    outcome = machine.run(RatesRequest(device=kind).trial(timeout_s=TIMEOUT_S))
    if not isinstance(outcome, Measured):
        what = (
            f"the machine's constants could not be measured: {describe(outcome)}:"
            f" {outcome.detail.strip()[-400:]}"
        )
        raise MachineLacks(
            what, next_step="Run autotune doctor, and try again on an idle machine."
        )
    rates = dict(outcome.figures)
    if (spread := rates.pop("spread")) > MOST_SPREAD:
        what = (
            f"the machine's constants could not be measured: times are {spread:.1f}"
            " times the shortest in the median"
        )
        raise Undecided(
            what, next_step="Stop what else uses the machine, and try again."
        )
    rates |= {"device": device, "source": f"measured on this machine, {when_utc[:10]}"}
    told = {"host_runs_ahead": kind == "cuda", "range_share": MEASURED_RANGE_SHARE}
    return parse_table(MachineRates, rates | told, where="measured constants")


def write_rates(rates: MachineRates, directory: Path = DIRECTORY) -> Path:
    """Write a machine's constants.

    Returns:
        The path of the file.

    Raises:
        BadInput: If the directory cannot be written.
    """
    path = rates_path(rates.device, directory)
    write_atomically(path, rates.model_dump_json(indent=1) + "\n")
    return path
