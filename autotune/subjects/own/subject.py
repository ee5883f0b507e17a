"""Functions of yours as a subject: a step, a loader, or both."""

import hashlib
import re
from pathlib import Path

from pydantic import Field

from trainer.formats.canonical_json import canonical_sha256
from trainer.formats.tables import StrictTable

Argument = bool | int | float | str
SIZE = "micro_batch_size"
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


class OwnCode(StrictTable):
    """Functions of yours, by name, and their fixed arguments."""

    step: str | None = None
    """``module:function`` that builds a step, or that trains until it is stopped; None
    for a loader alone."""
    loader: str | None = None
    """``module:function`` that builds a loader."""
    arguments: dict[str, Argument] = Field(default_factory=dict)
    along: str = SIZE
    """Argument of ``step`` whose largest value is searched."""

    @property
    def name(self) -> str:
        """Short name for files.

        It is the module's name, and the function's unless that has its usual name.
        """
        module, _, function = (self.step or self.loader or "").partition(":")
        parts = [Path(module).stem if "/" in module else module.rpartition(".")[2]]
        parts += (
            []
            if function in ("build_step", "build_loader")
            else [function.replace(".", "-")]
        )
        parts += ["loader"] if self.step is None else []
        whole = "-".join(
            [*parts, *(f"{name}-{value}" for name, value in self.arguments.items())]
        )
        plain = re.sub(r"[^\w.=+-]+", "_", whole).strip(".")
        if plain == whole and len(plain) <= _LONGEST_NAME:
            return plain
        return (
            f"{plain[:_LONGEST_NAME]}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"
        )

    @property
    def words(self) -> str:
        """The function with its fixed arguments."""
        fixed = ", ".join(f"{name}={value}" for name, value in self.arguments.items())
        return f"{self.step or self.loader}{f' ({fixed})' if fixed else ''}"

    @property
    def functions(self) -> dict[str, str]:
        """Names of the functions, by their role."""
        return {
            role: name
            for role, name in (("step", self.step), ("loader", self.loader))
            if name is not None
        }


class Subject(OwnCode):
    """Your functions, by name, with the arguments and the source that were measured."""

    step_sha256: str | None = None
    """SHA-256 of all your modules that importing the step imported: those outside of
    the installed packages."""
    loader_sha256: str | None = None

    @property
    def measured_sha256(self) -> str:
        """Hash of the measured code: the step, its source and fixed arguments.

        It is the loader's if there is no step.
        """
        own = {
            "step": self.step,
            "source": self.step_sha256,
            "arguments": self.arguments,
            "along": self.along,
        }
        if self.step is None:
            own = {
                "loader": self.loader,
                "source": self.loader_sha256,
                "arguments": self.arguments,
            }
        return canonical_sha256(own)
