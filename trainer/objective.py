"""The masked-LM loss of a micro-batch: encoder, prediction head on the places to predict, cross-entropy.

Shapes: B rows, S places of a row, T = B * S, D hidden, P tokens to predict, K slots of the head, V words.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from trainer.attention import ChosenAttention, encoder_inputs
from trainer.config import TrainConfig
from trainer.feed import MicroBatch
from trainer.masking import IGNORED_LABEL, head_slots
from trainer.model import family_of, window_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """Sums over the predicted tokens of a micro-batch; tensors of shape (), on the device."""

    loss_sum: torch.Tensor
    """Cross-entropy in nats, fp32."""
    correct: torch.Tensor
    """int64, tokens whose likeliest prediction was right."""


class MaskedLM(nn.Module):
    """A transformers encoder with its loss: what is wrapped, compiled and sharded.

    The head computes the places to predict only, which are 15 % of all; loss and gradients are those of a head on all
    places. Where shapes must not change (compiled layers, GPUs) it has a fixed number of slots, whose unused ones weigh
    nothing; a micro-batch with more tokens takes a multiple of it, and is counted.
    """

    def __init__(self, model: PreTrainedModel, config: TrainConfig, attention: ChosenAttention) -> None:
        super().__init__()
        self.model = model
        self.attention = attention
        self.overflows = 0
        """Micro-batches that needed more slots."""
        family = family_of(model.config)
        self._family = family
        self._masked_head = config.head == "masked"
        self._bf16 = config.precision == "bf16"
        self._first_position = model.config.pad_token_id + 1 if family and family.positions_after_pad else 0
        self._window_tokens = window_tokens(model.config)
        static = config.compile_layers or config.device == "cuda"
        places = config.micro_batch_rows * config.seq_length_tokens
        self._slots = head_slots(places, config.masking_probability) if static else None

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        """Summed cross-entropy of the predicted tokens in nats, fp32, shape (); for a batch on the device."""
        logits_KV, labels_K = self._predict(batch)
        return _cross_entropy(logits_KV, labels_K)

    def evaluate(self, batch: MicroBatch) -> Predictions:
        """Loss and hits, for a batch on the device."""
        logits_KV, labels_K = self._predict(batch)
        return Predictions(
            loss_sum=_cross_entropy(logits_KV, labels_K), correct=(logits_KV.argmax(dim=1) == labels_K).sum()
        )

    def _predict(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and labels, of the head's slots or of all places."""
        device_type = batch.ids_BS.device.type
        # torch.autocast knows no meta device, where nothing is computed anyway.
        autocast = self._bf16 and device_type != "meta"
        with torch.autocast(device_type if autocast else "cpu", dtype=torch.bfloat16, enabled=autocast):
            if not self._masked_head:
                return self._all_logits(batch), batch.labels_BS().flatten()
            place_K, labels_K = _slots(batch, self._slots_for(batch.predicted_tokens))
            return self._logits_at(place_K, batch), labels_K

    def _slots_for(self, predicted_tokens: int) -> int:
        if self._slots is None:
            return max(1, predicted_tokens)
        times = max(1, math.ceil(predicted_tokens / self._slots))
        self.overflows += times > 1
        return times * self._slots

    def _logits_at(self, place_K: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        if self._family is None:
            return self._all_logits(batch).index_select(0, place_K)
        hidden_TD = self._hidden(batch).flatten(0, 1)
        output: torch.Tensor = hidden_TD.index_select(0, place_K)
        for name in self._family.head:
            output = getattr(self.model, name)(output)
        return output

    def _all_logits(self, batch: MicroBatch) -> torch.Tensor:
        logits: torch.Tensor = self.model(**self._inputs(batch)).logits
        return logits.flatten(0, 1)

    def _hidden(self, batch: MicroBatch) -> torch.Tensor:
        assert self._family is not None
        hidden: torch.Tensor = getattr(self.model, self._family.encoder)(**self._inputs(batch)).last_hidden_state
        return hidden

    def _inputs(self, batch: MicroBatch) -> dict[str, torch.Tensor]:
        return encoder_inputs(
            batch,
            self.attention.kind,
            dtype=torch.bfloat16 if self._bf16 else self.model.dtype,
            first_position=self._first_position,
            window_tokens=self._window_tokens,
        )


def _slots(batch: MicroBatch, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Places and labels, shapes (K,): those to predict, then such as count for nothing."""
    device = batch.ids_BS.device
    place_K = torch.zeros(slots, dtype=torch.int64, device=device)
    labels_K = torch.full((slots,), IGNORED_LABEL, dtype=torch.int64, device=device)
    place_K[: batch.predicted_tokens] = batch.predicted_P
    labels_K[: batch.predicted_tokens] = batch.targets_P.to(torch.int64)
    return place_K, labels_K


def _cross_entropy(logits_KV: torch.Tensor, labels_K: torch.Tensor) -> torch.Tensor:
    # fp32 at least, as sums over the vocabulary lose too much in bf16.
    wide_KV = logits_KV if logits_KV.dtype == torch.float64 else logits_KV.float()
    return functional.cross_entropy(wide_KV, labels_K, ignore_index=IGNORED_LABEL, reduction="sum")
