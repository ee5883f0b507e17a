"""The interface of a subject: a training step that can be built and fed.

Every capability (``probe``, ``workers``, ``tune``, ``advise``, ``plan``, ``report``)
is written against ``Subject``. To tune a trainer that has no kind yet, write a class
with these members, and register it as an entry point of your package::

    [project.entry-points."autotune.subjects"]
    mytrainer = "my_package.subject:MySubject"

Then ``autotune probe --subject mytrainer --step my_module:make_trainer`` works, and so
do all commands that read the profile which it writes.

A subject is plain data and imports no torch: it only names functions, as ``Call``. The
child process of a trial imports and calls them:

- The function of ``step`` gets its arguments, ``device`` (``cpu`` or ``cuda``), and the
  size that is tried. It returns a function that takes one optimizer step, or it trains
  until it is stopped. With several ranks, the environment is that of torchrun, and the
  step is that of one rank. What it returns may have ``StepFacts``, from which trials
  learn more. If libraries should be opened before memory is measured, the function has
  an attribute ``before_budget``: a function of the same arguments, whose result the
  function gets as ``opened``.
- The function of ``loader`` gets its arguments, and of ``num_workers``,
  ``prefetch_factor`` and ``pin_memory`` those that it takes. It returns an iterable of
  batches, those of one rank, which may have ``LoaderFacts``. A step that takes an
  argument gets each batch.
- Both functions of a timed window get ``round_number`` if they have a parameter of this
  name: windows of one round are compared, and another round may have other data.
- The function of ``training`` gets its arguments, those of the loader, ``device`` and
  the size. It trains by its own loop, with its own loader, until it is stopped.
- The function of ``model`` gets its arguments and the size. It returns a module and its
  batch, on the meta device, from which memory is predicted before any trial.

What a subject cannot give is None; capabilities skip it and say so.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, Self

from autotune.evidence.argument import Argument as Argument  # noqa: PLC0414 - exported
from trainer.formats.canonical_json import canonical_sha256

MICRO_BATCH_SIZE = "micro_batch_size"
"""Usual name of the size that is searched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A function by name, and its arguments."""

    function: str
    """``module:function`` or ``path/of/script.py:function``."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments, as JSON; those that the function does not take are left
    out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The argument whose largest value is searched, and its unit."""

    name: str = MICRO_BATCH_SIZE
    """Name of the argument."""
    noun: str | None = None
    """One of the size in words, such as ``sequence``; None to name the argument."""
    unit: str = "samples"
    """Unit of throughput, as a plural: ``samples``, ``tokens``, ``images``."""
    units_per_size: float = 1.0
    """Units that one more of the size adds: 512 tokens for a micro-batch of sequences
    of 512 tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A setting of the step that may be varied, and its values."""

    name: str
    """Name of the argument; dotted for a nested one."""
    values: tuple[Argument, ...]
    """Values to try, the present one among them."""
    changes_recipe: bool = False
    """True if other values train another model, so that they are only suggested."""
    changes_rounding: bool = False
    """True if other values round differently, so that the loss is compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """Facts of a step, as its attribute ``autotune_facts``.

    Without it, a step is measured in seconds and bytes alone, one micro-batch a call.
    """

    micro_batches: int | None = None
    """Micro-batches of each rank in an optimizer step; None for one in each call. In a
    window, the step is called with a list of as many batches of the loader."""
    model_flops: float | None = None
    """FLOPs that the model requires for an optimizer step on this rank."""
    work: Callable[[Any], Mapping[str, float]] | None = None
    """Returns the work of a batch of the loader: ``units`` without padding,
    ``padded_units`` with it, and ``model_flops``. Other names are those of units, such
    as ``samples``, in which other subjects may count too; the subject's own unit may
    stand for ``units``. Without it, batches are counted."""
    prepare: Callable[[], object] | None = None
    """Called once before the first step."""
    begin_together: Callable[[], object] | None = None
    """Called before each step, so that all ranks begin together."""
    evaluate: Callable[[], object] | None = None
    """Evaluates as training does, which must fit in memory too. Called after the
    warm-up and after the last step."""
    loss: Callable[[], float] | None = None
    """Returns the loss of the last step, which must be finite."""
    losses: Callable[[], Sequence[float]] | None = None
    """Returns the loss of each step so far, if the step was asked to keep them, by its
    argument ``losses``."""
    settings: Mapping[str, Argument] | None = None
    """Present values of the subject's settings, by name; None if they are unknown."""
    end: Callable[[], object] | None = None
    """Called once after the last step, before the process ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderFacts:
    """Facts of a loader, as its attribute ``autotune_facts``.

    They are for windows in which the step that it feeds is replayed.
    """

    micro_batches: int | None = None
    """Batches of an optimizer step of each rank; None for one."""
    work: Callable[[Any], Mapping[str, float]] | None = None
    """Returns the work of a batch, as in ``StepFacts``. ``share`` is the share of the
    replayed time that it takes, 1 by default."""
    host_runs_ahead: bool = False
    """True if the host launches a step while the device computes the one before, and so
    does not read its loss. The replayed step then leaves the host free as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Hashes of the measured subject: results of another identity are not reused."""

    model_sha256: str
    """SHA-256 of the model, or of the code that takes its place."""
    dataset_hash: str = ""
    """Hash of the dataset; empty for a subject that has its own data."""


FACTS = "autotune_facts"
"""Attribute of a step or a loader that holds its facts."""


class Subject(Protocol):
    """A training step that can be built at a size and fed by a loader."""

    kind: ClassVar[str]
    """Name of the kind: that of the entry point, and of ``--subject``."""

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> Self:
        """Return the subject that ``table`` describes.

        Args:
            table: What ``table`` returned, from the profile; or, from the command line,
                ``step_function`` and ``loader_function`` (names, or None),
                ``arguments``, and ``along``, the name of the searched argument. The
                bundled trainer has its settings, as ``config``, and ``data``, the
                directory of its dataset.

        Raises:
            BadConfig: If the table is invalid.
        """

    def table(self) -> dict[str, Any]:
        """Return everything that defines the subject, as JSON."""

    @property
    def name(self) -> str:
        """Short name, for files."""

    @property
    def words(self) -> str:
        """The subject in words, for messages."""

    @property
    def size(self) -> Size:
        """The argument whose largest value is searched."""

    def code(self) -> Mapping[str, str]:
        """Return the functions of yours by role, whose modules are imported and hashed.

        Roles are ``step`` and ``loader``. It is empty if the source is that of an
        installed package, which the trials import themselves.
        """

    def identity(self, sources: Mapping[str, str]) -> Identity:
        """Return the hashes of what is measured, for the fingerprint of a profile.

        It is ``code_identity(self, sources)``, unless a model and a dataset say more.

        Args:
            sources: SHA-256 of your source by role, as in ``code``.
        """

    def settings(self) -> tuple[Setting, ...]:
        """Return the settings that may be varied; empty if there are none."""

    def step(self, choice: Mapping[str, Argument]) -> Call | None:
        """Return the function that builds the step with a choice of settings.

        The choice has the size. None if the subject has a loader alone.
        """

    def window_step(self, choice: Mapping[str, Argument]) -> Call | None:
        """Return the function that builds the step for batches of the loader.

        It is that of ``step``, unless that step has its own batches.
        """

    def loader(self, choice: Mapping[str, Argument]) -> Call | None:
        """Return the function that builds the loader with a choice of settings."""

    def training(self, choice: Mapping[str, Argument]) -> Call | None:
        """Return the function that trains by its own loop, with its own loader.

        The choice has settings of the loader, too. None if the step takes batches of
        the loader.
        """

    def untuned(self) -> Call | None:
        """Return the function that tells the settings of size and loader before tuning.

        It gets its arguments and ``directory``, and returns the values that your
        functions or the library take by default, by our names; None if one is not
        known. None if there is no such function.
        """

    def model(self, choice: Mapping[str, Argument]) -> Call | None:
        """Return the function that builds the model and its batch for a trace."""

    def apply(self, choice: Mapping[str, Argument]) -> dict[str, Any]:
        """Return a choice in the names of the subject's own configuration.

        For a ``TrainingArguments``, ``micro_batch_size`` is
        ``per_device_train_batch_size``.
        """


def code_identity(subject: Subject, sources: Mapping[str, str]) -> Identity:
    """Return the identity of code: the step, its arguments and its source.

    It is that of the loader if there is no step.

    Args:
        subject: The subject.
        sources: SHA-256 of its source by role.
    """
    role, call = "step", subject.step({})
    if call is None:
        role, call = "loader", subject.loader({})
    assert call is not None, "a subject has a step or a loader"
    return Identity(
        model_sha256=canonical_sha256(
            {
                "kind": subject.kind,
                "function": call.function,
                "arguments": dict(call.arguments),
                "size": subject.size.name,
                "source": sources.get(role),
            }
        )
    )
