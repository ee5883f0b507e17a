"""Search the settings of the step together for real tokens/s: Optuna asks, tells and prunes, a posterior proposes.

Every cell of the space keeps the global batch, and fits as far as memory can be predicted. A round reads the unexplored
settings beside the proposed ones, so that what a machine's minutes do to one they do to all; a cell is first read for a
short window, and goes on to a full one only if it may still be the best. The search stops when no cell is expected to
win more than the noise would let anybody see; until then those that may be the best are read again. Those that promise
most are then held against the unexplored settings and each other, window by window, until one is left; it is taken only
where it is proven to be faster than the unexplored settings, and learns the same where it rounds differently.

Windows are on batches from memory, as loaders are counted later, at whatever settings come out of this.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from autotune.core.knobs import Knobs
from autotune.core.outcome import Outcome
from autotune.decide.exploration import Posterior, expected_improvement
from autotune.search.exploration_known import LEAST_IMPROVEMENT, Known, Tried
from autotune.search.exploration_proof import Explored, prove
from autotune.search.exploration_windows import SHORT_PART, ExploreRequest, Windows
from autotune.search.trials import TrialRunner

if TYPE_CHECKING:
    import optuna

TOGETHER = 3
"""Proposed at once, and read beside one window of the unexplored settings."""
PRUNE_SIGMAS = 2.0
"""A first look so far below the best rules a cell out."""
LEAST_TRIALS = 12
VISIBLE_SHARE = 0.1
"""Of a window's noise: what a dozen windows of both in turn can tell apart."""


@dataclass(slots=True, kw_only=True)
class Exploration:
    """A search under way."""

    request: ExploreRequest
    runner: TrialRunner
    reading: Windows = field(init=False)
    known: Known = field(init=False)
    stopped_because: str = ""
    _proposed: Knobs | None = None
    """Last; None where nothing was left."""

    def __post_init__(self) -> None:
        self.reading = Windows(request=self.request, runner=self.runner)
        self.known = Known(cells=self.request.cells)

    @property
    def unexplored(self) -> Knobs:
        """What the profile has."""
        return self.request.unexplored

    @property
    def cells(self) -> tuple[Knobs, ...]:
        """Those that are left."""
        return self.known.cells

    @property
    def tried(self) -> dict[Knobs, Tried]:
        """What is known of each cell that was tried, the unexplored one included."""
        return self.known.tried

    @property
    def windows(self) -> int:
        """That were measured."""
        return self.reading.measured

    @property
    def seconds(self) -> float:
        """That windows took, those from the ledger included."""
        return self.reading.seconds

    def run(self) -> Explored:
        """Search, verify, and check the loss.

        Raises:
            Undecided: If the unexplored settings could not be measured.
        """
        study = self._study()
        while not (why := self._over()):
            asked = self._ask(study)
            if not asked:
                why = self._over() or "what is left takes longer than the time that is left"
                break
            self._round(study, asked)
        self.stopped_because = why
        return prove(self.known, self.reading)

    # What to read next.

    def _over(self) -> str:
        """Why the search ends; empty while it goes on."""
        tried = len(self.tried) - 1
        if len(self.cells) < 2:
            return "nothing else fits or runs"
        if tried >= self.request.most_trials:
            return f"{tried} cells are as many as were allowed"
        if self.reading.rounds and self._searching_s_left() <= 0:
            return "half of the time is used up, and the other half is for proof"
        if tried < min(LEAST_TRIALS, len(self.cells) - 1):
            return ""
        found = self.posterior()
        gain = float(expected_improvement(found, self.known.best_mean(found)).max())
        least = max(LEAST_IMPROVEMENT, VISIBLE_SHARE * found.noise_sigma)
        if gain < least:
            return f"nothing is expected to win more than {math.expm1(gain):.1%}, which is below the noise"
        return ""

    def posterior(self) -> Posterior:
        """What is believed of all cells that are left."""
        return self.known.believed()

    def propose(self, pending: Sequence[Knobs]) -> Knobs | None:
        """The cell that is expected to win most; those that are pending are taken to be as good as believed.

        None where nothing is left that fits, or that the time allows.
        """
        found = self.known.believed(pending)
        gains = expected_improvement(found, self.known.best_mean(found))
        takes_s = self.reading.takes_s
        # Gain per second, as Snoek, Larochelle and Adams, NeurIPS 2012, section 3.2: compiling takes a minute on a CPU.
        worth = {cell: gain / takes_s(cell) ** 0.5 for cell, gain in zip(self.cells, gains, strict=True)}
        self._proposed = None
        for cell in sorted(worth, key=lambda one: -worth[one]):
            if cell in pending or cell == self.unexplored or takes_s(cell) > self._searching_s_left():
                continue
            if cell in self.tried or self.request.fits(cell):
                self._proposed = cell
                break
            self.known.rule_out(cell)
        return self._proposed

    def _searching_s_left(self) -> float:
        return self.request.windows.budget_s / 2 - self.seconds

    def _study(self) -> "optuna.Study":
        import optuna

        from autotune.search.sampling import PosteriorSampler, VisiblePruner, distributions

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        return optuna.create_study(
            study_name="explore",
            direction="maximize",
            sampler=PosteriorSampler(distributions(self.request.cells), self.propose, seed=self.request.seed),
            pruner=VisiblePruner(self._hopeless),
        )

    def _hopeless(self, log_ratio: float) -> bool:
        """Whether a first look lies so far below the best that a full window could not mend it."""
        found = self.posterior()
        noise = found.noise_sigma * (1 + SHORT_PART**-0.5)
        return bool(log_ratio < self.known.best_mean(found) - max(PRUNE_SIGMAS * noise, LEAST_IMPROVEMENT))

    def _ask(self, study: "optuna.Study") -> "dict[Knobs, optuna.Trial]":
        """Trials of different cells; fewer, or none, where few are left."""
        from autotune.search.sampling import distributions

        space = distributions(self.request.cells)
        found: dict[Knobs, optuna.Trial] = {}
        while len(found) < TOGETHER:
            trial = study.ask(fixed_distributions=space)
            if self._proposed is None:
                _tell_nothing(study, trial, "fail")
                break
            found[self._proposed] = trial
        return found

    # A round.

    def _round(self, study: "optuna.Study", asked: "Mapping[Knobs, optuna.Trial]") -> None:
        """Read short windows of what is new, and full ones of all that is not pruned."""
        fresh = [cell for cell in asked if cell not in self.tried]
        going_on = [cell for cell in asked if cell not in fresh]
        looked = self._read(fresh, short=True)
        for cell in fresh:
            if cell not in looked:
                _tell_nothing(study, asked[cell], "fail")
                continue
            asked[cell].report(self.tried[cell].short[-1], step=0)
            if asked[cell].should_prune():
                self.tried[cell].outcome = "pruned"
                _tell_nothing(study, asked[cell], "pruned")
            else:
                going_on.append(cell)
        read = self._read(going_on, short=False)
        for cell in going_on:
            if cell in read:
                self.tried[cell].outcome = "ran"
                study.tell(asked[cell], self.tried[cell].ratios[-1])
            else:
                _tell_nothing(study, asked[cell], "fail")

    def _read(self, cells: Sequence[Knobs], *, short: bool) -> Mapping[Knobs, float]:
        """Windows of these beside one of the unexplored settings; real tokens/s of those that ran."""
        if not cells:
            return {}
        outcomes: dict[Knobs, Outcome] = self.reading.read([self.unexplored, *cells], short=short)
        rates = self.reading.rates(outcomes)
        self.known.note(rates, short=short)
        for cell in cells:
            if cell not in rates:
                self.known.failed(cell, outcomes[cell])
        return rates


def _tell_nothing(study: "optuna.Study", trial: "optuna.Trial", state: Literal["fail", "pruned"]) -> None:
    from optuna.trial import TrialState

    study.tell(trial, state=TrialState.FAIL if state == "fail" else TrialState.PRUNED)
