"""Advisor and autotuner for encoder pretraining.

It finds the fastest settings for a training, advises on its bottleneck, and plans its
cost; ``trainer`` then runs it. From Python, use ``find_batch_size`` and
``find_num_workers`` for a training loop of your own. Everything else is a command:
``cli`` registers them, and each package, such as ``tune`` or ``advice``, has its own
``command`` module, where to begin reading. Importing this package does not import
torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotune.api.finders import find_batch_size, find_num_workers

__all__ = ["__version__", "find_batch_size", "find_num_workers"]
__version__ = "0.1.0"
"""Version of encoder-autotune."""


def __getattr__(name: str) -> Any:
    """Import the finders when they are first used."""
    if name in ("find_batch_size", "find_num_workers"):
        from autotune.api import finders

        return getattr(finders, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
