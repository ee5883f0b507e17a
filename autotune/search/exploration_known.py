"""What an exploration knows of each cell, and which cells are left."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autotune.core.knobs import Knobs
from autotune.core.outcome import Contaminated, Outcome, OutOfMemory, describe
from autotune.decide.exploration import Posterior, Seen, expected_gain_over, posterior
from trainer.config import Precision

CRASHES = 2
"""Values of a knob that crashed so often, and never ran, are left out."""
FINALISTS = 6
"""As many are held against the unexplored settings, at most."""
LEAST_IMPROVEMENT = 0.003
"""Of the logarithm: less is not worth a search, however sure."""
_SURE = 8
"""Windows that the unexplored settings' ratio of one counts as."""


@dataclass(slots=True, kw_only=True)
class Tried:
    """What is known of a cell."""

    ratios: list[float] = field(default_factory=list)
    """Logarithms of the ratios to the unexplored settings, of full windows."""
    short: list[float] = field(default_factory=list)
    """The same of short ones."""
    full_rates: list[float] = field(default_factory=list)
    """Real tokens/s of full windows."""
    short_rates: list[float] = field(default_factory=list)
    outcome: str = "ran"
    crashed: bool = False
    """In a way that may be the fault of one of its values: out of memory is not, and other users are not."""

    @property
    def ran(self) -> bool:
        """Whether any window did."""
        return bool(self.full_rates or self.short_rates)

    @property
    def rates(self) -> list[float]:
        """Real tokens/s of full windows; of short ones where there is no full one."""
        return self.full_rates or self.short_rates

    @property
    def windows(self) -> int:
        """Full and short ones."""
        return len(self.full_rates) + len(self.short_rates)


@dataclass(slots=True, kw_only=True)
class Known:
    """Cells, and what was seen of them.

    Args:
        cells: Those that are left; the unexplored one first.
    """

    cells: tuple[Knobs, ...]
    unexplored: Knobs = field(init=False)
    tried: dict[Knobs, Tried] = field(default_factory=dict)
    unfit: set[Knobs] = field(default_factory=set)
    """Predicted or shown not to fit."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Values that only crashed, and why they are tried no more."""
    _believed: Posterior | None = None
    """Until something else is seen."""

    def __post_init__(self) -> None:
        self.unexplored = self.cells[0]
        self.tried[self.unexplored] = Tried()

    def note(self, rates: Mapping[Knobs, float], *, short: bool) -> None:
        """Windows of a round, among them one of the unexplored settings."""
        for cell, rate in rates.items():
            one = self.tried.setdefault(cell, Tried())
            (one.short_rates if short else one.full_rates).append(rate)
            if cell != self.unexplored:
                (one.short if short else one.ratios).append(math.log(rate / rates[self.unexplored]))
        self._believed = None

    def failed(self, cell: Knobs, outcome: Outcome) -> None:
        """Note it; a kind that runs out of memory is not tried with more rows, a value that only crashes no more."""
        one = self.tried.setdefault(cell, Tried())
        one.outcome = describe(outcome)
        one.crashed = not isinstance(outcome, OutOfMemory | Contaminated)
        self._keep(other for other in self.cells if other != cell)
        if isinstance(outcome, OutOfMemory):
            self.rule_out(cell)
        elif one.crashed:
            self._leave_out(cell)

    def _leave_out(self, crashed: Knobs) -> None:
        """Leave out the values of a crashed cell that never ran; where any of several may be at fault, all together."""
        suspects = {name: value for name, value in crashed.settings().items() if self._only_crashes(name, value)}
        if not suspects:
            return
        said = " and ".join(f"{name} {said_of(value)}" for name, value in suspects.items())
        together = " together" if len(suspects) > 1 else ""
        self.left_out[said] = f"{said}{together}: {CRASHES} cells failed, and none ran"
        self._keep(cell for cell in self.cells if any(getattr(cell, name) != value for name, value in suspects.items()))

    def _only_crashes(self, name: str, value: object) -> bool:
        of_value = [one for knobs, one in self.tried.items() if getattr(knobs, name) == value]
        return sum(one.crashed for one in of_value) >= CRASHES and not any(one.ran for one in of_value)

    def rule_out(self, unfit: Knobs) -> None:
        """A cell that does not fit, and those of its kind with more rows."""
        kind = replace(unfit, micro_batch_rows=1)
        more = {
            cell
            for cell in self.cells
            if replace(cell, micro_batch_rows=1) == kind and cell.micro_batch_rows >= unfit.micro_batch_rows
        }
        self.unfit |= more - {self.unexplored}
        self._keep(cell for cell in self.cells if cell not in self.unfit)

    def _keep(self, cells: Iterable[Knobs]) -> None:
        self.cells = tuple(cells)
        self._believed = None

    def believed(self, lies: Sequence[Knobs] = ()) -> Posterior:
        """What is believed of all cells that are left.

        Args:
            lies: Cells that are being read, and are taken to be as good as believed.
        """
        if self._believed is None:
            self._believed = posterior(self.cells, self._seen())
        if not lies:
            return self._believed
        place, mean = self.places, self._believed.mean
        told = [Seen(cell=place[cell], log_ratio=float(mean[place[cell]])) for cell in lies]
        return posterior(self.cells, [*self._seen(), *told])

    @property
    def places(self) -> dict[Knobs, int]:
        """Where each cell stands in what is believed."""
        return {cell: number for number, cell in enumerate(self.cells)}

    def _seen(self) -> list[Seen]:
        place = self.places
        # The unexplored settings are one, by definition, and as surely as many windows could tell.
        seen = [Seen(cell=place[self.unexplored], log_ratio=0.0) for _ in range(_SURE)]
        for cell, tried in self.tried.items():
            if cell in place:
                seen += [Seen(cell=place[cell], log_ratio=one) for one in tried.ratios]
                seen += [Seen(cell=place[cell], log_ratio=one, short=True) for one in tried.short]
        return seen

    def best_mean(self, found: Posterior) -> float:
        """Of the cells that ran, the highest that is believed; a logarithm."""
        return max(
            float(found.mean[number])
            for cell, number in self.places.items()
            if cell == self.unexplored or (cell in self.tried and self.tried[cell].ran)
        )

    def finalists(self, precisions: Collection[Precision]) -> list[Knobs]:
        """Cells of these precisions that ran and may well be the fastest, the most promising first."""
        ran = [
            cell
            for cell, one in self.tried.items()
            if one.ran and cell in self.cells and cell.precision in precisions and cell != self.unexplored
        ]
        return self.may_be_fastest(ran)[:FINALISTS]

    def may_be_fastest(self, cells: Sequence[Knobs]) -> list[Knobs]:
        """The one believed to be the fastest, and those that are expected to win something over it.

        Without that one where it is the unexplored settings, which are held against these in any case.
        """
        found, place = self.believed(), self.places
        fastest = max([self.unexplored, *cells], key=lambda cell: float(found.mean[place[cell]]))
        gains = expected_gain_over(found, place[fastest])
        others = [cell for cell in cells if cell != fastest and gains[place[cell]] >= LEAST_IMPROVEMENT]
        others.sort(key=lambda cell: -float(gains[place[cell]]))
        return others if fastest == self.unexplored else [fastest, *others]

    def consider(self, cell: Knobs) -> None:
        """Take one more into the space."""
        if cell not in self.cells:
            self._keep((*self.cells, cell))


def said_of(value: object) -> str:
    """A knob's value as profiles write it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
