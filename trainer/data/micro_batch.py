"""Micro-batch: the tensors with which one forward and backward pass is computed.

Ids and positions are copied to the device in their small stored types, and widened
there.

Shapes: B sequences of a micro-batch, S positions of a sequence, N samples in the
micro-batch, P tokens to predict.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from trainer.data.masking import IGNORED_LABEL
from trainer.data.position import Position


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One micro-batch on the host, or, after ``to``, on a device."""

    ids_BS: torch.Tensor
    """Ids, uint16 or uint32 as stored, with special tokens, masks and padding."""
    starts_N: torch.Tensor
    """Start of each sample in the flattened sequences, int32, ascending."""
    tokens_N: torch.Tensor
    """Tokens of each sample, int32, special tokens included."""
    predicted_P: torch.Tensor
    """Positions of the tokens to predict in the flattened sequences, int32."""
    targets_P: torch.Tensor
    """Original ids of the tokens to predict, in the type of ``ids_BS``."""
    non_padding_tokens: int
    """Tokens of all samples, special tokens included."""
    predicted_tokens: int
    """Number of tokens to predict."""
    most_predicted_in_sequence: int
    """Largest number of tokens to predict in one sequence."""
    padded_sequences: int
    """Sequences that end in padding; empty ones are padding only."""
    after: Position | None = None
    """Position of the job after this optimizer step; only with the last micro-batch of
    a step."""

    def to(self, device: torch.device) -> "MicroBatch":
        """Copy to a device, asynchronously if the memory is pinned."""
        return self._moved(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "MicroBatch":
        """Copy to page-locked memory; called by the DataLoader."""
        return self._moved(torch.Tensor.pin_memory)

    def _moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> "MicroBatch":
        """Return a micro-batch whose tensors are those that ``move`` returns."""
        return replace(
            self,
            ids_BS=move(self.ids_BS),
            starts_N=move(self.starts_N),
            tokens_N=move(self.tokens_N),
            predicted_P=move(self.predicted_P),
            targets_P=move(self.targets_P),
        )

    def wide_ids_BS(self) -> torch.Tensor:
        """Return the ids as int64, which embeddings require."""
        return self.ids_BS.to(torch.int64)

    def attention_BS(self) -> torch.Tensor:
        """Return the padding mask, int64, 1 for non-padding tokens.

        The layout must have one sample per sequence.
        """
        sequences, width = self.ids_BS.shape
        device = self.ids_BS.device
        # An empty sequence gets length 1: its first padding token is attended to, as a
        # softmax over no token would be NaN. That token adds no loss.
        lengths_B = torch.ones(sequences, dtype=torch.int32, device=device)
        lengths_B[self.starts_N.to(torch.int64) // width] = self.tokens_N
        positions_S = torch.arange(width, device=device)
        return (positions_S[None, :] < lengths_B[:, None]).to(torch.int64)

    def labels_BS(self) -> torch.Tensor:
        """Return the labels, int64.

        They are ``IGNORED_LABEL`` at positions that are not predicted.
        """
        labels_BS = torch.full(
            self.ids_BS.shape,
            IGNORED_LABEL,
            dtype=torch.int64,
            device=self.ids_BS.device,
        )
        predicted_P = self.predicted_P.to(torch.int64)
        labels_BS.view(-1)[predicted_P] = self.targets_P.to(torch.int64)
        return labels_BS
