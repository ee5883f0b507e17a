"""Sweeps and searches as Optuna studies, by ask and tell.

Each count, size or configuration that is measured is one Optuna trial: its value is
throughput, its attributes are what else the windows told. A study is in memory, or in a
file that optuna-dashboard and ``optuna.visualization`` open. The trial log remains the
record of measurements: a command that is repeated replaces its study, and tells the new
one the trials of the trial log as well.

    study = open_study("bert-mini-cpu: workers", file=Path("tuning.journal"))
    values = {"num_workers": range(0, 9), "pin_memory": (True, False)}
    trial = study.ask(values, {"num_workers": 4, "pin_memory": True})
    study.tell(trial, 120_000.0, attributes={"data_wait_share": 0.01})

Functions import Optuna when they are called, because the import is slow.
"""

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from autotune.errors import BadInput
from autotune.evidence.argument import Argument
from autotune.evidence.gpu_use import GpuUse

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler
    from optuna.storages import BaseStorage

JOURNAL_SUFFIXES = (".journal", ".log")
"""Suffixes of files that are written as Optuna's journal."""
SQLITE_SUFFIXES = (".db", ".sqlite", ".sqlite3")
"""Suffixes of files that are written as an SQLite database."""
MADE_BY = "encoder-autotune"
"""Attribute ``made_by`` of our studies: only these are replaced."""
GPU_ATTRIBUTES = (
    "utilisation_share",
    "gpm_sm_share",
    "gpm_tensor_share",
    "gpm_dram_share",
    "power_w",
)
"""Fields of ``GpuUse`` that are attributes of trials, under the same names."""
State = Literal["complete", "pruned", "failed"]
"""End of a trial: measured; abandoned after a short window; without a result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PositiveIntegers:
    """Numbers from ``least`` to ``most``, on a log scale."""

    least: int
    most: int


Values = Sequence[Argument] | range | PositiveIntegers
"""Values of a parameter: choices, consecutive numbers, or numbers on a log scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningStudy:
    """An Optuna study of one phase of tuning."""

    study: "optuna.Study"
    """The study itself, for visualisation."""
    file: Path | None = None
    """File of the study; None if it is in memory."""
    _running: "dict[int, optuna.Trial]" = field(default_factory=dict)
    """Trials that have begun and not ended, by number."""

    def note(self, attributes: Mapping[str, object]) -> None:
        """Set attributes of the whole study, such as its upper bound.

        Raises:
            BadInput: If the study's file cannot be written.
        """
        with _translated(self.file):
            for name, attribute in attributes.items():
                if attribute is not None:
                    self.study.set_user_attr(name, attribute)

    def name_metric(self, name: str) -> None:
        """Name the value of trials, if its unit is known only after the first one.

        Raises:
            BadInput: If the study's file cannot be written.
        """
        with _quiet_optuna(), _translated(self.file):
            self.study.set_metric_names([name])

    def ask(
        self,
        values: Mapping[str, Values],
        params: Mapping[str, Argument] | None = None,
    ) -> "optuna.Trial":
        """Begin a trial.

        Args:
            values: Values of each parameter.
            params: Parameters of the trial; None asks the study's sampler for them.

        Raises:
            BadInput: If the study's file cannot be written.
        """
        with _translated(self.file):
            if params is not None:
                self.study.enqueue_trial(dict(params))
            trial = self.study.ask(distributions_of(values))
        self._running[trial.number] = trial
        return trial

    def report(self, trial: "optuna.Trial", value: float, step: int) -> None:
        """Add an intermediate value, such as of one of several windows.

        Raises:
            BadInput: If the study's file cannot be written.
        """
        with _translated(self.file):
            trial.report(value, step)

    def tell(
        self,
        trial: "optuna.Trial",
        value: float | None = None,
        *,
        state: State = "complete",
        attributes: Mapping[str, object] | None = None,
    ) -> None:
        """End a trial.

        Args:
            trial: Trial that ``ask`` returned.
            value: Throughput, in units/s. Of a pruned trial it is that of its short
                window; of a failed one it is None.
            state: How it ended.
            attributes: What else is known, as JSON; those that are None are left out.

        Raises:
            BadInput: If the study's file cannot be written.
        """
        from optuna.trial import TrialState

        self._running.pop(trial.number, None)
        with _translated(self.file):
            for name, attribute in (attributes or {}).items():
                if attribute is not None:
                    trial.set_user_attr(name, attribute)
            if state == "complete":
                self.study.tell(trial, value)
                return
            if value is not None:
                # A pruned trial has no other value.
                trial.report(value, step=0)
            ended = TrialState.PRUNED if state == "pruned" else TrialState.FAIL
            self.study.tell(trial, state=ended)

    def fail_running(self, outcome: str = "interrupted") -> None:
        """End the trials that are running as failed.

        Args:
            outcome: Why they have no result, in words.
        """
        for trial in list(self._running.values()):
            self.tell(trial, state="failed", attributes={"outcome": outcome})


def open_study(
    name: str,
    *,
    file: Path | None = None,
    sampler: "BaseSampler | None" = None,
    unit: str = "units",
) -> TuningStudy:
    """Open an empty study that maximises throughput.

    Args:
        name: Name of the study: profile and phase, such as ``bert-mini-cpu: workers``.
        file: File of the study, a journal or a database by its suffix; it may have
            other studies, and one of this name is replaced. None keeps it in memory.
        sampler: Proposes parameters; None for Optuna's default.
        unit: Unit of throughput, as a plural: ``tokens``.

    Raises:
        BadInput: If the file cannot be used, or if its study of this name was not made
            by this project.
    """
    import optuna

    # Optuna reads a journal line by line as JSON with certain keys.
    with _quiet_optuna(), _translated(file, ValueError, KeyError, RuntimeError):
        storage = None
        if file is not None:
            storage = _storage(file)
            _delete_earlier(name, storage, file)
        study = optuna.create_study(
            study_name=name, direction="maximize", sampler=sampler, storage=storage
        )
        study.set_user_attr("made_by", MADE_BY)
        study.set_metric_names([f"{unit}/s"])
    return TuningStudy(study=study, file=file)


def distributions_of(values: Mapping[str, Values]) -> "dict[str, BaseDistribution]":
    """Return Optuna's distributions of values.

    Raises:
        ValueError: If a parameter has no value.
    """
    return {name: _distribution(given) for name, given in values.items()}


def gpu_attributes(use: GpuUse | None) -> dict[str, float]:
    """Return the activity of GPUs as attributes of a trial.

    What the GPUs do not report is left out.
    """
    if use is None:
        return {}
    figures = use.model_dump(include=set(GPU_ATTRIBUTES))
    return {name: value for name, value in figures.items() if value is not None}


def check_study_file(file: Path) -> None:
    """Check that a file has the suffix of a journal or a database.

    Raises:
        BadInput: If it has another one.
    """
    suffixes = (*JOURNAL_SUFFIXES, *SQLITE_SUFFIXES)
    if file.suffix not in suffixes:
        raise BadInput(
            f"{file} cannot be used as a study: its suffix is none of"
            f" {', '.join(suffixes)}",
            next_step=f"Choose a journal, such as --study {file.stem}.journal.",
        )


def _distribution(values: Values) -> "BaseDistribution":
    from optuna.distributions import CategoricalDistribution, IntDistribution

    if isinstance(values, PositiveIntegers):
        return IntDistribution(values.least, values.most, log=True)
    if isinstance(values, range):
        return IntDistribution(values[0], values[-1], step=values.step)
    return CategoricalDistribution(tuple(values))


def _storage(file: Path) -> "BaseStorage":
    """Return the storage of a file, which is created if necessary."""
    from optuna.storages import JournalStorage, RDBStorage
    from optuna.storages.journal import JournalFileBackend

    check_study_file(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix in JOURNAL_SUFFIXES:
        return JournalStorage(JournalFileBackend(str(file)))
    return RDBStorage(f"sqlite:///{file.absolute()}")


def _delete_earlier(name: str, storage: "BaseStorage", file: Path) -> None:
    """Delete the study of an earlier run of the same command.

    Raises:
        BadInput: If another program made it.
    """
    import optuna

    if name not in optuna.get_all_study_names(storage):
        return
    earlier = optuna.load_study(study_name=name, storage=storage)
    if earlier.user_attrs.get("made_by") != MADE_BY:
        raise BadInput(
            f"{file} has a study {name!r} that another program made",
            next_step="Choose another file for --study.",
        )
    optuna.delete_study(study_name=name, storage=storage)


@contextlib.contextmanager
def _translated(file: Path | None, *unreadable: type[Exception]) -> Iterator[None]:
    """Translate errors of a study's file to ``BadInput``.

    Args:
        file: The file; None if the study is in memory, and nothing is translated.
        unreadable: Further errors by which Optuna rejects a file.
    """
    if file is None:
        yield
        return
    from sqlalchemy.exc import SQLAlchemyError

    errors: tuple[type[Exception], ...] = (OSError, SQLAlchemyError, *unreadable)
    try:
        yield
    except errors as error:
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise BadInput(
            f"{file} cannot be used as a study: {reason}",
            next_step="Choose another file for --study, or remove this one.",
        ) from error


@contextlib.contextmanager
def _quiet_optuna() -> Iterator[None]:
    """Leave out Optuna's note on each new study, and that metric names are new."""
    import optuna
    from optuna.exceptions import ExperimentalWarning

    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(max(verbosity, optuna.logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(verbosity)
