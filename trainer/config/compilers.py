"""Programs that ``torch.compile`` needs on a machine. No torch here."""

import importlib.util
import os
import shutil
from dataclasses import dataclass, replace

from trainer.config.resolve import ResolvedConfig
from trainer.formats.errors import BadConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compiler:
    """C or C++ compiler that ``torch.compile`` calls."""

    variable: str
    """Environment variable that may name the compiler."""
    programs: tuple[str, ...]
    """Programs to search on the path if the variable is not set."""


_COMPILERS = {
    # Inductor generates kernels in C++.
    "cpu": _Compiler(variable="CXX", programs=("g++", "c++", "clang++")),
    # Triton generates the code that launches its kernels in C.
    "cuda": _Compiler(variable="CC", programs=("gcc", "cc", "clang")),
}
"""Compiler that is needed for each device."""


def with_compile(resolved: ResolvedConfig) -> tuple[ResolvedConfig, str | None]:
    """Decide whether to compile layers on a GPU, if the configuration leaves it open.

    Returns:
        The configuration, and the reason for a decision not to compile; None if layers
        are compiled, or if there was nothing to decide.
    """
    config = resolved.config
    if config.compile is not None or config.device != "cuda":
        return resolved, None
    missing = missing_for_compile("cuda")
    config = config.model_copy(update={"compile": missing is None})
    resolved = replace(resolved, config=config)
    if missing is None:
        return resolved, None
    return resolved, f"layers are not compiled, and slower: {missing}"


def missing_for_compile(device: str) -> str | None:
    """Return the part of ``torch.compile`` that this machine lacks, as text.

    Returns:
        None if nothing is missing.
    """
    if device == "cuda":
        return missing_for_triton()
    return _missing_compiler(device)


def missing_for_triton() -> str | None:
    """Return what Triton's kernels lack on this machine, as text; None if nothing."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return _missing_compiler("cuda")


def require_triton(setting: str) -> None:
    """Check that this machine can compile the Triton kernels of a setting.

    Args:
        setting: Key of the setting in ``train``, which is true or false.

    Raises:
        BadConfig: If Triton or its compiler is missing.
    """
    missing = missing_for_triton()
    if missing is not None:
        raise BadConfig(
            f"train.{setting} requires Triton kernels: {missing}",
            next_step=f"Use --set train.{setting}=false",
        )


def _missing_compiler(device: str) -> str | None:
    """Return the compiler that a device needs, as text; None if there is one."""
    compiler = _COMPILERS[device]
    if os.environ.get(compiler.variable):
        return None
    for program in compiler.programs:
        if shutil.which(program) is not None:
            return None
    return f"no compiler found ({', '.join(compiler.programs)})"
