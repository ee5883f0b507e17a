"""Advisor and autotuner for encoder pretraining. This package's process never imports torch.

Six functions are for other programs: ``from autotune import tune``. Each is loaded when it is first asked for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotune.api import advise, compare, estimate, plan, read_profile, tune

__version__ = "0.1.0"
__all__ = ["advise", "compare", "estimate", "plan", "read_profile", "tune"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - one of the functions
    """One of the six functions, on first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module("autotune.api"), name)


def __dir__() -> list[str]:
    """The six functions, loaded or not."""
    return sorted([*globals(), *__all__])
