"""Modules, optimizers and tensors of a program, and the names of modules."""

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakIdKeyDictionary

_WRAPPERS = {
    "OptimizedModule": "_orig_mod",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
}
"""Attribute with the wrapped module, by the class of modules that wrap others."""
_WRAPPED_PARTS = frozenset(
    {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
)
"""Parts of qualified names that stand for a wrapper."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramParts:
    """Parts of a program that Python can reach."""

    modules: tuple[nn.Module, ...]
    """Modules with parameters that are part of no other, the largest first."""
    optimizers: tuple[torch.optim.Optimizer, ...]
    tensors: tuple[torch.Tensor, ...]


def find_parts() -> ProgramParts:
    """Return the models, optimizers and tensors of this process."""
    modules: list[nn.Module] = []
    optimizers: list[torch.optim.Optimizer] = []
    tensors: list[torch.Tensor] = []
    for value in gc.get_objects():
        # The type: libraries have objects that import modules if asked for a class.
        value_type = type(value)
        if issubclass(value_type, torch.Tensor):
            tensors.append(value)
        elif issubclass(value_type, nn.Module):
            modules.append(value)
        elif issubclass(value_type, torch.optim.Optimizer):
            optimizers.append(value)
    return ProgramParts(
        modules=_roots_of(modules), optimizers=tuple(optimizers), tensors=tuple(tensors)
    )


def _roots_of(modules: list[nn.Module]) -> tuple[nn.Module, ...]:
    """Return modules with parameters that are part of no other, the largest first."""
    part_ids = set()
    for module in modules:
        # A module whose constructor has not ended has no parts yet.
        children = module.__dict__.get("_modules", {})
        part_ids |= {id(part) for part in children.values()}
    sizes = [
        (sum(parameter.numel() for parameter in module.parameters()), module)
        for module in modules
        if id(module) not in part_ids and "_parameters" in module.__dict__
    ]
    ordered = sorted(sizes, key=lambda pair: -pair[0])
    return tuple(module for size, module in ordered if size)


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module within wrappers such as DDP and compiled modules."""
    attribute = _WRAPPERS.get(type(module).__name__)
    inner = None if attribute is None else getattr(module, attribute, None)
    return unwrap(inner) if isinstance(inner, nn.Module) else module


class ModuleNames:
    """Qualified names of modules; models may be added at any time.

    A model is called by its class. The names of the parts of a second model and of
    further ones begin with it.
    """

    def __init__(self) -> None:
        self.classes: dict[str, str] = {}
        """Class of each module, by its name."""
        self._names: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._owners: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """Name of the module of each parameter and buffer."""

    def add(self, model: nn.Module) -> None:
        """Add a model with all its parts; those that are known are left out."""
        inner = unwrap(model)
        title = type(inner).__name__
        if title in self.classes:
            title = f"{title}#{len(self.classes)}"
        prefix = f"{title}." if self.classes else ""
        for path, module in inner.named_modules():
            if module in self._names:
                continue
            parts = [part for part in path.split(".") if part not in _WRAPPED_PARTS]
            name = prefix + ".".join(parts) if path else title
            self._names[module] = name
            self.classes[name] = type(unwrap(module)).__name__
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    self._owners[tensor] = name
        while model is not inner:
            self._names[model] = self._names[inner]
            model = getattr(model, _WRAPPERS[type(model).__name__])

    def __contains__(self, module: nn.Module) -> bool:
        """Return whether a module is part of a model."""
        return module in self._names

    def name_of(self, module: nn.Module) -> str:
        """Return the name of a module, which is added as a model if it is new.

        A module without parameters, such as a loss that is made for a call, is only
        called by its class.
        """
        if module not in self._names:
            if next(module.parameters(), None) is None:
                return type(module).__name__
            self.add(module)
        name: str = self._names[module]
        return name

    def owner_of(self, tensor: torch.Tensor) -> str | None:
        """Return the name of the module of a parameter or buffer, if it has one."""
        owner: str | None = self._owners.get(tensor)
        return owner

    def modules(self) -> list[nn.Module]:
        """Return all modules of all models."""
        return list(self._names)

    def owned_tensors(self) -> list[tuple[torch.Tensor, str]]:
        """Return all parameters and buffers with the names of their modules."""
        return list(self._owners.items())


def plain_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors with memory in a tensor, such as the local part of a DTensor.

    Nothing is yielded for other values, and for tensors that have no memory.
    """
    if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
        return
    if is_traceable_wrapper_subclass(value):
        names, _ = value.__tensor_flatten__()
        for name in names:
            yield from plain_tensors(getattr(value, name))
    elif value.device.type in ("cpu", "cuda") and value.layout is torch.strided:
        yield value
