"""The windows of a sweep as an Optuna study, rebuilt from its ledger whenever one is wanted."""

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.core.outcome import Measured
from autotune.core.trial import FeedFigures, FinishedTrial
from autotune.store import unwritable_means_bad_input
from trainer.disk import write_atomically

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution

PREFETCH_CHOICES = (1, 2, 4, 8)


def loader_space(max_workers: int, *, pinning: bool) -> "dict[str, BaseDistribution]":
    """The joint space of loader settings; without a GPU there is nothing to pin memory for."""
    from optuna.distributions import CategoricalDistribution, IntDistribution

    space: dict[str, BaseDistribution] = {
        "loader_workers": IntDistribution(0, max_workers),
        "prefetch_batches": CategoricalDistribution(PREFETCH_CHOICES),
    }
    return space | ({"pin_memory": CategoricalDistribution((True, False))} if pinning else {})


def study_of(
    windows: Iterable[FinishedTrial], max_workers: int, *, pinning: bool, storage: str | None = None, seed: int = 0
) -> "optuna.Study":
    """A study that maximises the ratio of slot tokens/s to those of batches from memory in the same round.

    A window whose settings lie outside the space, and one without its round's ceiling, is left out.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        study_name="loader",
        direction="maximize",
        storage=storage,
        sampler=optuna.samplers.TPESampler(seed=seed),
    )
    space = loader_space(max_workers, pinning=pinning)
    measured = [
        (one.trial.measured, FeedFigures.of(one.outcome))
        for one in windows
        if one.trial.job == "feed" and isinstance(one.outcome, Measured)
    ]
    ceilings = {what["round"]: figures.slot_tokens_per_s for what, figures in measured if what["cached"]}
    for what, figures in measured:
        params = {name: what["config"]["data"][name] for name in space}
        if what["cached"] or what["round"] not in ceilings or not _inside(params, space):
            continue
        study.add_trial(
            optuna.trial.create_trial(
                params=params,
                distributions=space,
                value=figures.slot_tokens_per_s / ceilings[what["round"]],
                user_attrs={
                    "round": what["round"],
                    "slot_tokens_per_s": figures.slot_tokens_per_s,
                    "data_wait_share": figures.data_wait_share,
                },
            )
        )
    return study


def export_study(windows: Iterable[FinishedTrial], max_workers: int, *, pinning: bool, path: Path) -> None:
    """Write the study as an SQLite file that ``optuna-dashboard`` opens.

    It is written on this host's own disk and then moved, because SQLite is not safe on shared file systems. A file that
    is there is replaced.

    Raises:
        BadInput: If the place cannot be written.
    """
    with unwritable_means_bad_input(path), tempfile.TemporaryDirectory(prefix="study-") as place:
        local = Path(place) / "study.db"
        study_of(windows, max_workers, pinning=pinning, storage=f"sqlite:///{local}")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, local.read_bytes())


def _inside(params: "dict[str, Any]", space: "dict[str, BaseDistribution]") -> bool:
    from optuna.distributions import CategoricalDistribution, IntDistribution

    for name, distribution in space.items():
        value = params.get(name)
        if isinstance(distribution, CategoricalDistribution) and value not in distribution.choices:
            return False
        if isinstance(distribution, IntDistribution) and not distribution.low <= (value or 0) <= distribution.high:
            return False
    return True
