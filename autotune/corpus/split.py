"""Which samples are kept apart for validation: decided by their content, so the same on every machine and for ever."""

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autotune.corpus.pieces import Index

_WORD = 2**64


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationSplit:
    """A seeded choice of a share of all possible contents. Data that is added later moves nothing."""

    share: float
    seed: int

    def chosen(self, index: Index) -> npt.NDArray[np.bool_]:
        """Which samples are for validation; shape (samples,)."""
        return drawn(index, self.share, f"validation {self.seed}")


def drawn(index: Index, share: float, purpose: str) -> npt.NDArray[np.bool_]:
    """Which samples fall into a share, for a purpose that makes the choice its own; shape (samples,)."""
    key = hashlib.blake2b(purpose.encode(), digest_size=32).digest()
    below = int(share * _WORD)
    hashes = (hashlib.blake2b(name.tobytes(), digest_size=8, key=key).digest() for name in index["digest"])
    return np.fromiter((int.from_bytes(word) < below for word in hashes), dtype=bool, count=len(index))
