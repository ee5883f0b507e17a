"""What rows of a dataset hold, as far as a prediction needs it."""

from dataclasses import dataclass

from trainer.dataset import SpecialIds


@dataclass(frozen=True, slots=True, kw_only=True)
class RowContents:
    """Of a dataset, a part of which was laid out; or assumed, for want of one."""

    vocab_size: int
    special_ids: SpecialIds
    mean_real_tokens: float
    mean_samples: float
    documents: float
    """In the fullest micro-batches."""
    dataset_hash: str | None
    """None where all of it is assumed."""

    @property
    def assumed(self) -> bool:
        """Whether nobody looked at a dataset."""
        return self.dataset_hash is None
