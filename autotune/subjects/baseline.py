"""A subject with a choice of settings, to be timed beside others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from autotune.evidence.baseline import SettingDifference, SettingValue
from autotune.subjects.subject import Argument, Subject

LOADER_SETTINGS = ("num_workers", "prefetch_factor", "pin_memory")
"""Names of the settings of a loader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """A subject with a choice of settings: the tuned one, or one to compare with it."""

    name: str
    """Name of its row, unique in a comparison."""
    subject: Subject
    """The subject."""
    choice: Mapping[str, Argument] = field(default_factory=dict)
    """Choice of its settings; it has the size, unless the subject itself has it."""
    loader_settings: Mapping[str, Argument] = field(default_factory=dict)
    """Settings of the loader; those that are missing stay as the subject has them."""
    fed_by: Literal["loader", "step", "training"] = "loader"
    """Source of the batches in a window: its loader, the step itself, or its training
    loop."""
    differences: Sequence[SettingDifference] = ()
    """Differences from the tuned settings."""
    non_padding_share: float | None = None
    """Average share of units in a window that are no padding; None if each window
    counts its own."""
    fit_choice: Mapping[str, Any] | None = None
    """Settings, besides the size, of the trial that checks that the size fits memory;
    None if that is not checked."""

    @property
    def size(self) -> int | None:
        """Value of the size in the choice; None if the subject has it itself."""
        size = self.choice.get(self.subject.size.name)
        return None if size is None else int(size)

    def with_size(self, size: int, reason: str) -> "Baseline":
        """Return it with another size, and the reason for that."""
        name = self.subject.size.name
        tuned: SettingValue = self.size
        for difference in self.differences:
            if difference.key == name:
                tuned = difference.tuned
        changed = SettingDifference(key=name, theirs=size, tuned=tuned, reason=reason)
        others = [other for other in self.differences if other.key != name]
        return replace(
            self,
            choice={**self.choice, name: size},
            differences=(changed, *others),
        )
