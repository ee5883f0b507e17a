"""Advisor and autotuner for training on GPUs.

It finds the fastest settings for a training, advises on its bottleneck, and plans its
cost; ``trainer`` then runs it. From Python, use ``find_batch_size`` and
``find_num_workers`` for a training loop of your own, ``estimate`` for the memory of a
model on a GPU, and ``read_profile`` for a result. Everything else is a command: ``cli``
registers them, and each package, such as ``tune`` or ``advice``, has its own
``command`` module, where to begin reading. Importing this package does not import
torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotune.api.batch_size import find_batch_size
    from autotune.api.num_workers import find_num_workers
    from autotune.api.prediction import estimate
    from autotune.errors import AutotuneError
    from autotune.profiles.store import read_profile

__all__ = [
    "AutotuneError",
    "__version__",
    "estimate",
    "find_batch_size",
    "find_num_workers",
    "read_profile",
]
__version__ = "0.1.0"
"""Version of encoder-autotune."""
_MODULES = {
    "AutotuneError": "autotune.errors",
    "estimate": "autotune.api.prediction",
    "find_batch_size": "autotune.api.batch_size",
    "find_num_workers": "autotune.api.num_workers",
    "read_profile": "autotune.profiles.store",
}
"""Module of each public name, imported when the name is first used."""


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    """Return the public names, for completion."""
    return sorted(__all__)
