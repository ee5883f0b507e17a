"""Figures compared with their targets, which are set before a measurement."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.bars import Bar, Direction

Figures = Mapping[str, Sequence[Mapping[str, Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A figure with its target, and the stages that measure it."""

    name: str
    """Ends in the unit."""
    meaning: str
    measured_by: str
    """Names or prefixes of stages, with commas between."""
    direction: Direction
    target: float
    figure: Callable[[Figures], float | None]

    def bar(self, figures: Figures) -> Bar:
        """Return the figure with its target; open if it was not measured."""
        return Bar(
            name=self.name,
            figure=self.figure(figures),
            unit=self.name.rpartition("_")[2],
            bar=self.target,
            direction=self.direction,
        )


def _values(figures: Figures, table: str, key: str) -> list[float]:
    return [row[key] for row in figures.get(table, ()) if row.get(key) is not None]


def _least(table: str, *keys: str) -> Callable[[Figures], float | None]:
    def figure(figures: Figures) -> float | None:
        values = [value for key in keys for value in _values(figures, table, key)]
        return min(values, default=None)

    return figure


def _most(table: str, *keys: str) -> Callable[[Figures], float | None]:
    def figure(figures: Figures) -> float | None:
        values = [value for key in keys for value in _values(figures, table, key)]
        return max(values, default=None)

    return figure


def _mfu_of(model: str) -> Callable[[Figures], float | None]:
    def figure(figures: Figures) -> float | None:
        rows = figures.get("training", ())
        values = [row["mfu_share"] for row in rows if row["training"] == model]
        return values[0] if values else None

    return figure


def _worst_error(key: str) -> Callable[[Figures], float | None]:
    def figure(figures: Figures) -> float | None:
        errors = [
            abs(row[key] / row["peak_bytes"] - 1)
            for row in figures.get("memory", ())
            if row.get(key) and row.get("peak_bytes")
        ]
        return max(errors, default=None)

    return figure


def _configurations(figures: Figures) -> float | None:
    return len(_values(figures, "memory", "traced_peak_bytes")) or None


def _above_largest(figures: Figures) -> float | None:
    shares = [
        row["traced"] / row["largest"] - 1
        for row in figures.get("memory", ())
        if row["traced"]
    ]
    return max(shares, default=None)


def against_fastest_trainer(figures: Figures) -> float | None:
    """Return ours divided by the fastest configuration of transformers' Trainer.

    Both ran in the same call; None if they did not.
    """
    rows = [row for row in figures.get("trainers", ()) if row["trainer"] != "paper"]
    rows = [row for row in rows if row["tokens_per_s"]]
    if not rows:
        return None
    fastest = max(rows, key=lambda row: float(row["tokens_per_s"]))
    ratio: float | None = fastest["ours_to_theirs_ratio"]
    return ratio


def _single(name: str) -> Callable[[Figures], float | None]:
    def figure(figures: Figures) -> float | None:
        rows = figures.get("single", ())
        return next((row["value"] for row in rows if row["figure"] == name), None)

    return figure


_DELIVERED = ("tune_to_promised_ratio", "train_to_promised_ratio")
CLAIMS = (
    Claim(
        name="delivered_to_promised_least_ratio",
        meaning="tokens/s, delivered ÷ promised, least",
        measured_by="tune,train",
        direction=">=",
        target=0.98,
        figure=_least("promised", *_DELIVERED),
    ),
    Claim(
        name="delivered_to_promised_most_ratio",
        meaning="tokens/s, delivered ÷ promised, most",
        measured_by="tune,train",
        direction="<=",
        target=1.02,
        figure=_most("promised", *_DELIVERED),
    ),
    Claim(
        name="bert_120m_mfu_share",
        meaning="MFU of bert-120m in training",
        measured_by="tune-bert-120m,train-bert-120m",
        direction=">=",
        target=0.40,
        figure=_mfu_of("bert-120m"),
    ),
    Claim(
        name="bert_350m_mfu_share",
        meaning="MFU of bert-350m in training",
        measured_by="tune-bert-350m,train-bert-350m",
        direction=">=",
        target=0.46,
        figure=_mfu_of("bert-350m"),
    ),
    Claim(
        name="modernbert_base_mfu_share",
        meaning="MFU of modernbert-base in training",
        measured_by="probe-modernbert-base,train-modernbert-base",
        direction=">=",
        target=0.38,
        figure=_mfu_of("modernbert-base"),
    ),
    Claim(
        name="against_fastest_trainer_ratio",
        meaning=(
            "non-padding tokens/s, ours ÷ the fastest configuration of transformers'"
            " Trainer"
        ),
        measured_by="tune-bert-120m,train-bert-120m,trainer",
        direction=">=",
        target=3.3,
        figure=against_fastest_trainer,
    ),
    Claim(
        name="configurations_count",
        meaning="configurations whose memory is predicted and measured",
        measured_by="tune,probe",
        direction=">=",
        target=12,
        figure=_configurations,
    ),
    Claim(
        name="peak_worst_error_share",
        meaning="worst error of the peak memory predicted before any trial",
        measured_by="tune,probe",
        direction="<=",
        target=0.015,
        figure=_worst_error("traced_peak_bytes"),
    ),
    Claim(
        name="corrected_worst_error_share",
        meaning="worst error once smaller trials corrected it",
        measured_by="tune,probe",
        direction="<=",
        target=0.01,
        figure=_worst_error("corrected_peak_bytes"),
    ),
    Claim(
        name="above_largest_share",
        meaning="predicted largest micro-batch above the measured one, worst",
        measured_by="tune,probe",
        direction="<=",
        target=0.03,
        figure=_above_largest,
    ),
    Claim(
        name="data_wait_share",
        meaning="data wait with the chosen num_workers",
        measured_by="workers",
        direction="<=",
        target=0.01,
        figure=_most("workers", "data_wait_share"),
    ),
    Claim(
        name="tune_s",
        meaning="autotune tune of both presets",
        measured_by="newcomer",
        direction="<=",
        target=900.0,
        figure=_single("tune_s"),
    ),
    Claim(
        name="asynchronous_save_share",
        meaning="cost of an asynchronous save ÷ that of a synchronous one",
        measured_by="saves",
        direction="<=",
        target=0.20,
        figure=_single("asynchronous_save_share"),
    ),
)
"""All claims, the most valuable first."""
