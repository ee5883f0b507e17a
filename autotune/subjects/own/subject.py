"""Functions of yours as a subject: a step, a loader, or both."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field, PositiveFloat

from autotune.subjects.subject import (
    MICRO_BATCH_SIZE,
    Argument,
    Call,
    Identity,
    Setting,
    Size,
    code_identity,
)
from trainer.formats.errors import BadConfig
from trainer.formats.tables import StrictTable, parse_table

SIZE = MICRO_BATCH_SIZE
"""Argument of ``build_step`` that is searched by default."""
IN_TRIAL = "AUTOTUNE_IN_TRIAL"
"""Environment variable that is set in processes that run trials of your code."""
WRAPPED = "__autotune_wrapped__"
"""Attribute of a decorated function that holds yours, which is what trials call."""

LOOP = "__autotune_loop__"
"""Attribute of a function that is known to be a training loop, not a step."""
LOOP_STEPS = 16
"""Optimizer steps in one call of any other function from which it is left as a training
loop."""
_LONGEST_NAME = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """How a library's trainer becomes a step and a loader.

    Without an adapter, your functions build them. Those of an adapter get:

    - ``build``: the name of your function, which makes the library's trainer.
    - ``arguments``: its fixed arguments. One that it does not name is a setting of the
      library; one that neither takes is an error.
    - ``directory``: the directory from which it is imported.
    - ``micro_batch_size``: the size to try; None keeps that of your trainer.
    - ``losses``: True to keep the loss of each micro-batch.
    - Settings of the library, which replace yours, and other arguments of your
      function.

    They raise ``BadConfig`` if your function returns something else.
    """

    step_function: str | None = None
    """Function that builds the step, for ``device``."""
    loader_function: str | None = None
    """Function that builds the loader, with ``num_workers`` and those of
    ``prefetch_factor`` and ``pin_memory`` that it takes; None keeps yours."""
    training_function: str | None = None
    """Function that trains by the library's own loop and loader until it is stopped,
    called alike with the loader's settings; None if the step takes batches."""
    untuned_function: str | None = None
    """Function that returns the settings of size and loader that the library's trainer
    has without tuning, by our names. It gets ``build``, ``arguments`` and
    ``directory``. None if the defaults of your functions tell them."""
    settings: tuple[Setting, ...] = ()
    """Settings of the library that may be varied, the usual value of each first."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Names of settings in the library's configuration, by ours."""


class FunctionSubject(StrictTable):
    """Functions of yours, by name, and their fixed arguments.

    A subclass of another kind only names its adapter.
    """

    kind: ClassVar[str] = "own"
    adapter: ClassVar[Adapter] = Adapter()

    step_function: str | None = None
    """``module:function`` that builds a step, or that trains until it is stopped; None
    for a loader alone."""
    loader_function: str | None = None
    """``module:function`` that builds a loader."""
    arguments: dict[str, Argument] = Field(default_factory=dict)
    """Fixed arguments of both functions."""
    varied: dict[str, list[Argument]] = Field(default_factory=dict)
    """Values of arguments and settings that may be varied, the present one first. You
    declare that all of them train the same model."""
    along: str = SIZE
    """Argument of the step's function whose largest value is searched."""
    unit: str = "samples"
    """Unit of throughput, as a plural."""
    units_per_size: PositiveFloat = 1.0
    """Units that one more of the size adds."""

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> Self:
        """Return the subject that ``table`` describes.

        Raises:
            BadConfig: If the table is invalid, or has an argument that autotune sets
                under another name.
        """
        subject = parse_table(cls, dict(table), where="[subject]")
        for name, library_name in cls.adapter.names.items():
            if library_name != name and library_name in subject.arguments:
                value = subject.arguments[library_name]
                raise BadConfig(
                    f"{library_name}={value} cannot be set: autotune sets"
                    f" {library_name}, which it calls {name}",
                    next_step=f"To fix it in a sweep of workers: --set {name}={value}"
                    if name == subject.along
                    else "Leave it out.",
                )
        return subject

    def table(self) -> dict[str, Any]:
        """Return the functions, their arguments, and the searched argument."""
        return self.model_dump(mode="json", exclude_defaults=True)

    @property
    def name(self) -> str:
        """Short name for files.

        It is the module's name, and the function's unless that has its usual name.
        """
        module, _, function = self._first_function.partition(":")
        parts = [Path(module).stem if "/" in module else module.rpartition(".")[2]]
        if function not in ("build_step", "build_loader"):
            parts.append(function.replace(".", "-"))
        if self.step_function is None:
            parts.append("loader")
        parts += [f"{name}-{value}" for name, value in self.arguments.items()]
        whole = "-".join(parts)
        plain = re.sub(r"[^\w.=+-]+", "_", whole).strip(".")
        if plain == whole and len(plain) <= _LONGEST_NAME:
            return plain
        digest = hashlib.sha256(whole.encode()).hexdigest()[:8]
        return f"{plain[:_LONGEST_NAME]}-{digest}"

    @property
    def words(self) -> str:
        """The function with its fixed arguments."""
        if not self.arguments:
            return self._first_function
        fixed = ", ".join(f"{name}={value}" for name, value in self.arguments.items())
        return f"{self._first_function} ({fixed})"

    @property
    def _first_function(self) -> str:
        return self.step_function or self.loader_function or ""

    @property
    def size(self) -> Size:
        """The searched argument."""
        return Size(name=self.along, unit=self.unit, units_per_size=self.units_per_size)

    def code(self) -> dict[str, str]:
        """Return the functions of yours by role."""
        functions = {"step": self.step_function, "loader": self.loader_function}
        return {role: name for role, name in functions.items() if name is not None}

    def identity(self, sources: Mapping[str, str]) -> Identity:
        """Return the hash of your function, its arguments and its source."""
        return code_identity(self, sources)

    def settings(self) -> tuple[Setting, ...]:
        """Return the settings of the library, and those that you vary."""
        library = {setting.name: setting for setting in self.adapter.settings}
        varied = {
            name: replace(
                library.get(name, Setting(name=name, values=())), values=tuple(values)
            )
            for name, values in self.varied.items()
        }
        return tuple({**library, **varied}.values())

    def step(self, choice: Mapping[str, Argument]) -> Call | None:
        """Return the call of your function with the fixed arguments and a choice."""
        return self._call(self.step_function, self.adapter.step_function, choice)

    def window_step(self, choice: Mapping[str, Argument]) -> Call | None:
        """Return the call of ``step``, which takes batches if it has an argument."""
        return self.step(choice)

    def loader(self, choice: Mapping[str, Argument]) -> Call | None:
        """Return the call of your loader's function."""
        return self._call(
            self.loader_function or self._maker, self.adapter.loader_function, choice
        )

    def training(self, choice: Mapping[str, Argument]) -> Call | None:
        """Return the call of the library's loop, or of your function.

        Yours is used only if it trains until it is stopped.
        """
        adapter = self.adapter.training_function
        if adapter is None and self.adapter.step_function is not None:
            return None
        return self._call(self.step_function, adapter, choice)

    def untuned(self) -> Call:
        """Return the function that tells the size and loader settings without tuning.

        For your own functions they are the defaults of the arguments.
        """
        if self.adapter.untuned_function is not None:
            build = {"build": self.step_function, "arguments": self.arguments}
            return Call(function=self.adapter.untuned_function, arguments=build)
        return Call(
            function="autotune.subjects.jobs.untuned:default_arguments",
            arguments={
                "step": self.step_function,
                "loader": self.loader_function or self._maker,
                "size": self.along,
            },
        )

    @property
    def _maker(self) -> str | None:
        """Your function that makes a library's trainer, which has its own loader."""
        if self.adapter.loader_function is None:
            return None
        return self.step_function

    def _call(
        self, function: str | None, adapter: str | None, choice: Mapping[str, Argument]
    ) -> Call | None:
        if function is None:
            return None
        present = {name: values[0] for name, values in self.varied.items()}
        if adapter is None:
            return Call(
                function=function, arguments={**present, **self.arguments, **choice}
            )
        # The library's trainer has the size, not the function that makes it.
        given = dict(self.arguments)
        size = {self.along: given.pop(self.along)} if self.along in given else {}
        arguments = {"build": function, "arguments": given, **present, **size}
        return Call(function=adapter, arguments={**arguments, **choice})

    def model(self, choice: Mapping[str, Argument]) -> Call | None:
        """Return None: the bench finds ``build_model`` when it imports the step."""
        return None

    def apply(self, choice: Mapping[str, Argument]) -> dict[str, Any]:
        """Return the values in the library's names; the arguments of your functions."""
        names = self.adapter.names
        return {
            **self.arguments,
            **{names.get(name, name): value for name, value in choice.items()},
        }
