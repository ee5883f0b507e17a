"""Keys of the arguments of an operator's call."""

from typing import Any

import torch


def call_key(value: Any) -> Any:
    """Return a key of everything in arguments on which the shapes of results depend.

    Args:
        value: An argument, or a tuple, list or dictionary of them.

    Returns:
        None for None, and if an argument cannot be compared.
    """
    if isinstance(value, torch.Tensor):
        return (value.size(), value.stride(), value.dtype, value.device.type)
    if isinstance(value, tuple | list):
        keys = tuple(call_key(item) for item in value)
        for key, item in zip(keys, value, strict=True):
            if key is None and item is not None:
                return None
        return keys
    if isinstance(value, dict):
        return call_key(tuple(value.items()))
    if value is None or not value.__hash__:
        return None
    # 1 and 1.0 are equal, and give results of different types.
    return (type(value), value)
