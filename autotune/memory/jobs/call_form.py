"""Calls without their tensors, to find calls with the same graph and repeat them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

_CLASS = "class of the data"
"""Key of the class in a dictionary that stands for a dataclass instance."""
_TENSOR = "a tensor"
"""Stands for a tensor among the leaves of the arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """A call without its tensors; with tensors, it can be made again."""

    state_names: Sequence[str]
    """Names of parameters and buffers, which are the first inputs of a graph."""
    structure: pytree.TreeSpec
    """Nesting of the arguments."""
    leaves: Sequence[Any]
    """Innermost values of the arguments, with ``_TENSOR`` in place of tensors."""

    @classmethod
    def of(
        cls,
        state: Mapping[str, torch.Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> "tuple[CallForm, list[torch.Tensor]]":
        """Return the form of a call, and the tensors among its arguments.

        Args:
            state: Parameters and buffers that the call uses, by name.
            args: Positional arguments.
            kwargs: Keyword arguments; a dataclass among them may hold tensors.
        """
        plain_kwargs = {name: _to_plain(value) for name, value in kwargs.items()}
        leaves, structure = pytree.tree_flatten((args, plain_kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        leaves_without_tensors = tuple(
            _TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
        )
        form = cls(
            state_names=list(state), structure=structure, leaves=leaves_without_tensors
        )
        return form, tensors

    def state_of(self, inputs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the parameters and buffers among the inputs of a graph, by name."""
        return dict(zip(self.state_names, inputs, strict=False))

    def arguments_of(
        self, inputs: Sequence[torch.Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and the keyword arguments of the call.

        Args:
            inputs: Inputs of a graph: the state, then the tensors of the arguments.
        """
        tensors = iter(inputs[len(self.state_names) :])
        leaves = [next(tensors) if leaf is _TENSOR else leaf for leaf in self.leaves]
        args, plain_kwargs = pytree.tree_unflatten(leaves, self.structure)
        return args, {name: _from_plain(value) for name, value in plain_kwargs.items()}


def _to_plain(value: Any) -> Any:
    """Return a dataclass instance as a dictionary, in which pytree finds tensors.

    Other values are returned unchanged.
    """
    if not is_dataclass(value) or isinstance(value, type):
        return value
    plain = {field.name: getattr(value, field.name) for field in fields(value)}
    return {_CLASS: type(value), **plain}


def _from_plain(value: Any) -> Any:
    """Return the dataclass instance of such a dictionary; other values unchanged."""
    if isinstance(value, dict) and _CLASS in value:
        return value.pop(_CLASS)(**value)
    return value
