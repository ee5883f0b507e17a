"""What is exported: a profile, on so many ranks, and what its rows hold. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autotune.core.export import Equivalent, ExportedBatch, RowsHold
from autotune.core.profile import Profile
from autotune.decide.export.batch import exported_batch
from autotune.decide.rates import expected_rate, tuned_rate
from trainer.config import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One profile to be said in other words."""

    profile: Profile
    nodes: int
    ranks_per_node: int
    hold: RowsHold

    @property
    def train(self) -> TrainConfig:
        """The settings."""
        return self.profile.train

    @property
    def ranks(self) -> int:
        """All that train together."""
        return self.nodes * self.ranks_per_node

    @property
    def batch(self) -> ExportedBatch:
        """The optimizer step here and there."""
        return exported_batch(self.profile, self.hold, self.ranks)

    @property
    def is_packed(self) -> bool:
        """Whether a row holds several samples."""
        return self.train.layout == "packed"

    @property
    def model_type(self) -> str:
        """As transformers names it."""
        return str(self.train.model.config["model_type"])

    @property
    def step_s(self) -> tuple[float, str] | None:
        """Seconds of an optimizer step of this trainer, and where they come from; None where nothing was measured."""
        tokens, rate = self.batch.real_tokens_per_step, expected_rate(self.profile, self.ranks)
        if tokens is None:
            return None
        if rate is not None:
            return tokens / rate.value, f"{rate.known}: {rate.source}"
        tuned = tuned_rate(self.profile)
        if tuned is None:
            return None
        return tokens / (tuned.value * self.ranks / tuned.ranks), f"assumed: as fast on each rank as in {tuned.source}"


Rule = Callable[[Subject], Sequence[Equivalent]]
"""A few settings that are translated together."""
