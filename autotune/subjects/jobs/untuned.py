"""Settings of size and loader that your functions take by default."""

import inspect
from typing import Any

from autotune.subjects.jobs import load

TORCH_DEFAULTS: dict[str, Any] = {
    "num_workers": 0,
    "prefetch_factor": None,
    "pin_memory": False,
}
"""Defaults of torch's DataLoader."""


def default_arguments(
    *, step: str | None, loader: str | None, size: str, directory: str
) -> dict[str, Any]:
    """Return the defaults of the arguments of your functions for size and loader.

    Arguments of the loader without a default have that of torch's DataLoader.

    Args:
        step: Name of the function that builds the step, if there is one.
        loader: Name of the function that builds the loader, if there is one.
        size: Name of the size.
        directory: Directory from which they are imported.

    Returns:
        The values by name; the size is None if it has no default.
    """
    told: dict[str, Any] = {size: None}
    if loader is not None:
        of_loader = _defaults(loader, directory)
        for name, default in TORCH_DEFAULTS.items():
            told[name] = of_loader.get(name, default)
        told[size] = of_loader.get(size)
    if step is not None:
        told[size] = _defaults(step, directory).get(size, told[size])
    return told


def _defaults(name: str, directory: str) -> dict[str, Any]:
    """Return the defaults of a function's parameters that JSON can hold."""
    try:
        parameters = inspect.signature(load.resolve(name, directory)).parameters
    except (TypeError, ValueError):
        return {}
    return {
        parameter.name: parameter.default
        for parameter in parameters.values()
        if isinstance(parameter.default, bool | int | float | str)
    }
