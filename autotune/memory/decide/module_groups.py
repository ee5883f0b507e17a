"""Names of modules: equal layers in one group, and few enough groups to read.

Names are qualified, as those of ``torch.nn.Module.named_modules``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from autotune.evidence.peak_contents import ContentKind

_ANY = "*"
"""Stands for the numbers of equal layers in the name of a group."""


@dataclass(slots=True, kw_only=True)
class ModuleGroup:
    """Modules that are shown as one."""

    pattern: tuple[str, ...]
    """Parts of the name, with ``*`` for the numbers of equal layers."""
    names: set[tuple[str, ...]] = field(default_factory=set)
    """Names of the modules, cut to as many parts as the pattern has."""
    bytes_by_kind: dict[ContentKind, int] = field(default_factory=dict)
    """Bytes of all modules together."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all kinds."""
        return sum(self.bytes_by_kind.values())

    @property
    def title(self) -> str:
        """Name for people: ``encoder.layers.* (12)`` for twelve layers."""
        if len(self.names) == 1:
            (name,) = self.names
            return ".".join(name)
        return f"{'.'.join(self.pattern)} ({len(self.names)})"

    def add(
        self, names: set[tuple[str, ...]], sizes: Mapping[ContentKind, int]
    ) -> None:
        """Add modules with their bytes, and cut their names."""
        self.names |= {name[: len(self.pattern)] for name in names}
        for kind, size_bytes in sizes.items():
            self.bytes_by_kind[kind] = self.bytes_by_kind.get(kind, 0) + size_bytes


def group_modules(
    bytes_by_module: Mapping[str, Mapping[ContentKind, int]],
    classes: Mapping[str, str],
    max_groups: int,
) -> list[ModuleGroup]:
    """Group modules until there are few enough, the largest group first.

    Equal layers are one group: modules whose names differ in numbers alone, if all
    numbered parts of their container have the same class. If there are still too many
    groups, the smallest one joins the module that contains it, again and again.

    Args:
        bytes_by_module: Bytes of each module's own allocations, by kind.
        classes: Class of each module of the model.
        max_groups: Most groups to return; there may be more if as many modules have no
            module above them.
    """
    containers = _uniform_containers(classes)
    groups: dict[tuple[str, ...], ModuleGroup] = {}
    for name, sizes in bytes_by_module.items():
        parts = tuple(name.split("."))
        pattern = _pattern_of(parts, containers)
        group = groups.setdefault(pattern, ModuleGroup(pattern=pattern))
        group.add({parts}, sizes)
    while len(groups) > max_groups:
        inner = [group for group in groups.values() if len(group.pattern) > 1]
        if not inner:
            break
        smallest = min(inner, key=lambda group: (group.size_bytes, group.pattern))
        del groups[smallest.pattern]
        outer_pattern = smallest.pattern[:-1]
        outer = groups.setdefault(outer_pattern, ModuleGroup(pattern=outer_pattern))
        outer.add(smallest.names, smallest.bytes_by_kind)
    return sorted(groups.values(), key=lambda group: (-group.size_bytes, group.title))


def _uniform_containers(classes: Mapping[str, str]) -> set[str]:
    """Return the modules of which all numbered parts have the same class."""
    classes_of_parts: dict[str, list[str]] = {}
    for name, class_name in classes.items():
        container, _, last = name.rpartition(".")
        if last.isdigit():
            classes_of_parts.setdefault(container, []).append(class_name)
    return {
        container
        for container, parts in classes_of_parts.items()
        if len(parts) > 1 and len(set(parts)) == 1
    }


def _pattern_of(parts: tuple[str, ...], containers: set[str]) -> tuple[str, ...]:
    """Return a name with ``*`` for the numbers of equal layers."""
    pattern = []
    for position, part in enumerate(parts):
        container = ".".join(parts[:position])
        is_equal_layer = part.isdigit() and container in containers
        pattern.append(_ANY if is_equal_layer else part)
    return tuple(pattern)
