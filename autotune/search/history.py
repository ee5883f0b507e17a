"""What an exploration asks, and what is known of each cell."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from autotune.search.decide import Posterior, Seen, expected_gain_over, posterior, useful_share
from autotune.search.values import Configuration
from autotune.trials.values import Contaminated, FeedFigures, Outcome, OutOfMemory, describe
from autotune.workers.measure import TrainingWindows
from trainer.config.train_config import Layout, Precision, TrainConfig

CRASHES = 2
"""Values of a knob that crashed so often, and never ran, are left out."""
FINALISTS = 6
"""As many are held against the unexplored settings, at most."""
LEAST_IMPROVEMENT = 0.003
"""Of the logarithm: less is not worth a search, however sure."""
_SURE = 8
"""Windows that the unexplored settings' ratio of one counts as."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExploreRequest:
    """What to explore."""

    training: TrainingWindows
    """Its configuration is the unexplored one; its budget is for the search and what follows it."""
    cells: tuple[Configuration, ...]
    """The unexplored one first."""
    global_batch_size: Mapping[Layout, int]
    """The same global batch, by layout."""
    real_shares: Mapping[Layout, float | None]
    """Part of a row's places that holds real tokens, in the mean of the dataset; None where windows must tell."""
    most_trials: int = 60
    """Configurations to try."""
    left_out: tuple[str, ...] = ()
    fits: Callable[[Configuration], bool] = lambda knobs: True
    """By prediction; asked once a cell is proposed, as tracing takes seconds."""

    def config_of(self, cell: Configuration) -> TrainConfig:
        """The unexplored configuration with the knobs of a cell, at the same global batch."""
        rows = {"global_batch_size": self.global_batch_size[cell.layout]}
        other = {"global_batch_tokens": None, "global_batch_samples": None}
        return self.training.config.model_copy(update=cell.model_dump() | rows | other)

    def rate_of(self, cell: Configuration, figures: FeedFigures) -> float:
        """Real tokens/s of a window, as training has them at the global batch."""
        share = self.real_shares[cell.layout]
        real = figures.tokens_per_s if share is None else share * figures.padded_tokens_per_s
        return real * useful_share(cell, self.global_batch_size, self.training.limits.local_ranks)


@dataclass(slots=True, kw_only=True)
class Readings:
    """What is known of a cell."""

    full: list[tuple[float, float]] = field(default_factory=list)
    """Real tokens/s of full windows, and the logarithms of their ratios to the unexplored settings."""
    short: list[tuple[float, float]] = field(default_factory=list)
    """The same of short ones."""
    outcome: str = "ran"
    crashed: bool = False
    """In a way that may be the fault of one of its values: out of memory is not, and other users are not."""

    @property
    def best(self) -> list[tuple[float, float]]:
        """Full windows; short ones where there is no full one, and none where nothing ran."""
        return self.full or self.short


@dataclass(slots=True, kw_only=True)
class Cells:
    """Cells, and what was seen of them."""

    cells: tuple[Configuration, ...]
    """Those that are left; the unexplored one first."""
    starting: Configuration = field(init=False)
    tried: dict[Configuration, Readings] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    """Values that only crashed, and why they are tried no more."""
    _believed: Posterior | None = None
    """Until something else is seen."""

    def __post_init__(self) -> None:
        self.starting = self.cells[0]
        self.tried[self.starting] = Readings()

    def note(self, rates: Mapping[Configuration, float], *, short: bool) -> None:
        """Note windows of a round, among them one of the unexplored settings."""
        for cell, rate in rates.items():
            one = self.tried.setdefault(cell, Readings())
            (one.short if short else one.full).append((rate, math.log(rate / rates[self.starting])))
        self._believed = None

    def failed(self, cell: Configuration, outcome: Outcome) -> None:
        """Note it; a kind that runs out of memory is not tried with more rows, a value that only crashes no more."""
        one = self.tried.setdefault(cell, Readings())
        one.outcome = describe(outcome)
        one.crashed = not isinstance(outcome, OutOfMemory | Contaminated)
        self._keep(other for other in self.cells if other != cell)
        if isinstance(outcome, OutOfMemory):
            self.rule_out(cell)
        elif one.crashed:
            self._leave_out(cell)

    def _leave_out(self, crashed: Configuration) -> None:
        """Leave out the values of a crashed cell that never ran; where any of several may be at fault, all together."""
        suspects = {name: value for name, value in crashed.model_dump().items() if self._only_crashes(name, value)}
        if not suspects:
            return
        said = " and ".join(f"{name} {str(value).lower()}" for name, value in suspects.items())
        together = " together" if len(suspects) > 1 else ""
        self.left_out[said] = f"{said}{together}: {CRASHES} cells failed, and none ran"
        self._keep(cell for cell in self.cells if any(getattr(cell, name) != value for name, value in suspects.items()))

    def _only_crashes(self, name: str, value: object) -> bool:
        of_value = [one for knobs, one in self.tried.items() if getattr(knobs, name) == value]
        return sum(one.crashed for one in of_value) >= CRASHES and not any(one.best for one in of_value)

    def rule_out(self, unfit: Configuration) -> None:
        """Leave out a cell that does not fit, and those of its kind with more rows."""
        kind, rows = unfit.kind, unfit.micro_batch_size
        more = {cell for cell in self.cells if cell.micro_batch_size >= rows and cell.kind == kind}
        self._keep(cell for cell in self.cells if cell not in more - {self.starting})

    def _keep(self, cells: Iterable[Configuration]) -> None:
        self.cells = tuple(cells)
        self._believed = None

    def believed(self, lies: Sequence[Configuration] = ()) -> Posterior:
        """Return what is believed of all cells that are left; ``lies`` are taken to be as good as believed."""
        if self._believed is None:
            self._believed = posterior(self.cells, self._seen())
        if not lies:
            return self._believed
        place, mean = self.places, self._believed.mean
        told = [Seen(cell=place[cell], log_ratio=float(mean[place[cell]])) for cell in lies]
        return posterior(self.cells, [*self._seen(), *told])

    @property
    def places(self) -> dict[Configuration, int]:
        """Where each cell stands in what is believed."""
        return {cell: number for number, cell in enumerate(self.cells)}

    def _seen(self) -> list[Seen]:
        place = self.places
        # The unexplored settings are one, by definition, and as surely as many windows could tell.
        seen = [Seen(cell=place[self.starting], log_ratio=0.0) for _ in range(_SURE)]
        for cell, tried in self.tried.items():
            if cell in place and cell != self.starting:
                seen += [Seen(cell=place[cell], log_ratio=one) for _, one in tried.full]
                seen += [Seen(cell=place[cell], log_ratio=one, short=True) for _, one in tried.short]
        return seen

    def best_mean(self, found: Posterior) -> float:
        """Return the highest logarithm that is believed of the cells that ran."""
        ran = {self.starting, *(cell for cell, one in self.tried.items() if one.best)}
        return max(float(found.mean[number]) for cell, number in self.places.items() if cell in ran)

    def finalists(self, precisions: Collection[Precision]) -> list[Configuration]:
        """Cells of these precisions that ran and may well be the fastest, the most promising first."""
        ran = [cell for cell in self.tried if self.tried[cell].best and cell in self.cells and cell != self.starting]
        return self.may_be_fastest([cell for cell in ran if cell.precision in precisions])[:FINALISTS]

    def may_be_fastest(self, cells: Sequence[Configuration]) -> list[Configuration]:
        """The one believed to be the fastest, and those that are expected to win something over it.

        Without that one where it is the unexplored settings, which are held against these in any case.
        """
        found, place = self.believed(), self.places
        fastest = max([self.starting, *cells], key=lambda cell: float(found.mean[place[cell]]))
        gains = expected_gain_over(found, place[fastest])
        others = [cell for cell in cells if cell != fastest and gains[place[cell]] >= LEAST_IMPROVEMENT]
        others.sort(key=lambda cell: -float(gains[place[cell]]))
        return others if fastest == self.starting else [fastest, *others]

    def add_cell(self, cell: Configuration) -> None:
        """Take one more into the space."""
        if cell not in self.cells:
            self._keep((*self.cells, cell))
