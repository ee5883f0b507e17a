"""Figures of GPUs that README and docs quote.

They are from kept checks; until a figure was measured there, it is the one measured by
hand, or "not measured".
"""

import json
from pathlib import Path
from typing import Any

from benchmarks.gpu.claims import CLAIMS, against_fastest_trainer
from benchmarks.gpu.page import newest_figures, number
from benchmarks.gpu.results import read_checks

BY_HAND = "h100-80gb-hbm3/2026-11-27/by_hand.json"
WORDS = {
    "compiled": "bf16, batch 128, 8 workers, `torch_compile=True`, padded to 512",
    "bf16": "bf16, batch 128, 8 workers, dynamic padding",
    "grouped": "bf16, grouped by length, the largest batch that fits",
    "defaults": "its defaults: fp32, batch 8, 0 workers",
    "paper": "the paper's public trainer: fp32, batch 64, 8 workers",
}
"""Trainers, as pages name them."""


class GpuQuotes:
    """Figures of all GPUs.

    Args:
        kept: Directory of kept checks.
    """

    def __init__(self, kept: Path) -> None:
        self.by_hand: dict[str, Any] = json.loads((kept / BY_HAND).read_text())
        checks = [check for _, check in read_checks(kept.glob("*/*"))]
        checks.sort(key=lambda check: str(check["started_utc"]), reverse=True)
        self._figures = {
            name: newest_figures([check for check in checks if check["name"] == name])
            for name in dict.fromkeys(check["name"] for check in checks)
        }
        self.targets = {claim.name: claim.target for claim in CLAIMS}

    def against(self, trainer: str) -> float:
        """Return ours divided by a trainer; ``fastest`` is transformers' fastest.

        It is the newest of kept checks, or the one measured by hand.
        """
        for figures in self._figures.values():
            rows = figures.get("trainers", ())
            ratios = {row["trainer"]: row["ours_to_theirs_ratio"] for row in rows}
            ratios["fastest"] = against_fastest_trainer(figures)
            if (ratio := ratios.get(trainer)) is not None:
                return float(ratio)
        return self._ratio_by_hand(trainer)

    def _ratio_by_hand(self, trainer: str) -> float:
        rates = {
            row["trainer"]: float(row["tokens_per_s"])
            for row in self.by_hand["trainers"]
        }
        if trainer == "fastest":
            others = [rates[name] for name in rates if name not in ("ours", "paper")]
            return rates["ours"] / max(others)
        return rates["ours"] / rates[trainer]

    def conditions(self) -> str:
        """Return where the comparison with trainers is from."""
        for gpu, figures in self._figures.items():
            if against_fastest_trainer(figures) is not None:
                date = figures["trainers"][0]["date"]
                return f"measured on one {gpu} on {date}"
        return f"measured by hand on one H100 on {self.by_hand['measured']}"

    def trainer_rows(self) -> list[dict[str, str]]:
        """Return a row for each trainer: by hand, and of kept checks."""
        by_hand = {row["trainer"]: row for row in self.by_hand["trainers"]}
        measured: dict[str, str] = {}
        for gpu, figures in self._figures.items():
            for row in figures.get("trainers", ()):
                ratio = row["ours_to_theirs_ratio"]
                ours = f"{ratio:.1f} \N{MULTIPLICATION SIGN}" if ratio else "n/a"
                rate = number("tokens_per_s", row["tokens_per_s"])
                text = f"{rate}, ours {ours} ({gpu}, {row['date']})"
                measured.setdefault(row["trainer"], text)
        rows = []
        for name, words in WORDS.items():
            rate = by_hand.get(name, {}).get("tokens_per_s")
            rows.append(
                {
                    "name": words,
                    "rate": f"{rate:,}" if rate else "n/a",
                    "ours": (
                        f"{self._ratio_by_hand(name):.1f} \N{MULTIPLICATION SIGN}"
                        if rate
                        else "n/a"
                    ),
                    "measured": measured.get(name, "not measured"),
                }
            )
        return rows

    def rows(self, table: str) -> list[dict[str, str]]:
        """Return the rows of a table on all GPUs, as text, or one that says n/a.

        Each has ``name``, ``where`` and the columns of the table.
        """
        rows = []
        for gpu, figures in self._figures.items():
            for row in figures.get(table, ()):
                texts = {key: number(key, value) for key, value in row.items()}
                name = next(iter(texts.values()))
                where = f"{gpu}, {row['date']}"
                rows.append({**texts, "name": name, "where": where})
        return rows or [_NotMeasured(name="not measured", where="n/a")]


class _NotMeasured(dict[str, str]):
    """A row whose other columns are n/a."""

    def __missing__(self, key: str) -> str:
        return "n/a"
