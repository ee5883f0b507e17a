"""Masked-LM loss of a micro-batch: encoder, MLM head at the positions to predict, cross-entropy.

Shapes: B sequences, S positions of a sequence, T = B * S, D hidden, P tokens to
predict, K slots of the head, V ids.
"""

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from trainer.config.train_config import TrainConfig
from trainer.data.loader import MicroBatch
from trainer.data.masking import IGNORED_LABEL, SLOTS_MULTIPLE, head_slots
from trainer.model import precision
from trainer.model.attention import (
    ChosenAttention,
    EncoderInputs,
    document_queries,
    encoder_inputs,
    sequence_queries,
)
from trainer.model.encoder import head_inputs, model_head, model_layers, window_tokens
from trainer.model.families import FAMILIES
from trainer.model.loss import (
    cross_entropy,
    cross_entropy_in_place,
    liger_cross_entropy,
)
from trainer.model.packing import verify_working_copies
from trainer.model.sparse_last_layer import LastLayerQueries, make_sparse_layer

EVALUATION_CHUNK_POSITIONS = 4096
"""Positions whose logits are computed at once in evaluation if training holds none."""


class MaskedLM(nn.Module):
    """A transformers encoder with its loss: the module that is wrapped, compiled and sharded.

    The sparse MLM head computes only the positions to predict, 15 % of all, with the
    loss and gradients of the dense head. If shapes must not change (compiled layers,
    GPUs), it has a fixed number of slots; unused ones add no loss, and a micro-batch
    with more tokens uses a multiple of it and is counted. So it is with segments of
    varlen attention.
    """

    def __init__(
        self, model: PreTrainedModel, config: TrainConfig, attention: ChosenAttention
    ) -> None:
        super().__init__()
        self.model = model
        self.attention = attention
        self.overflows = 0
        """Micro-batches that needed more than the fixed number of slots or segments."""
        self.layers = () if attention.kind == "row" else model_layers(model)
        """Layers of the encoder, to compile and shard one at a time; empty if it cannot
        be packed."""
        self._masked_head = config.mlm_head == "sparse"
        self._bf16 = config.precision == "bf16"
        self._dtype = torch.bfloat16 if self._bf16 else model.dtype
        self.residual_dtype = (
            torch.bfloat16
            if self._bf16 and config.residual_dtype == "bf16"
            else torch.float32
        )
        self._window_tokens = window_tokens(model.config)
        self._packed = config.layout == "packed"
        self._segments: int | None = None
        """Segments of varlen attention that micro-batches hardly exceed, from the
        documents of one."""
        self.loss: Callable[..., torch.Tensor] = cross_entropy
        if config.compiled:
            self.loss = cross_entropy_in_place(
                functools.partial(torch.compile, dynamic=False)
            )
        self._replays_graphs = (
            config.compiled and config.compile_mode == "reduce-overhead"
        )
        self.fused_loss: Callable[..., torch.Tensor] | None = None
        """Loss from hidden states, weight, labels and bias of the head's last layer,
        without logits."""
        if config.fused_cross_entropy:
            _check_fused(config, model)
            self.fused_loss = liger_cross_entropy
        static = config.compiled or config.device == "cuda"
        places = config.micro_batch_size * config.seq_length_tokens
        self._slots = head_slots(places, config.masking_probability) if static else None
        self._sequence_slots = (
            head_slots(config.seq_length_tokens, config.masking_probability)
            if static
            else None
        )
        self.autocast: Callable[[str], AbstractContextManager[None]] = self._autocast
        """Context manager in which encoder and head are computed, by the type of
        device."""
        kinds = getattr(model.config, "layer_types", None) or ("full_attention",)
        wanted = config.mlm_head == "sparse" and config.last_layer == "sparse"
        layout = FAMILIES.get(model.config.model_type)
        self.has_sparse_last_layer = (
            wanted
            and attention.kind != "row"
            and layout is not None
            and kinds[-1] == "full_attention"
        )
        """True if the last layer is computed at the positions to predict only."""
        if self.has_sparse_last_layer and layout is not None:
            make_sparse_layer(self.layers[-1], layout)
        self.working_copies: precision.WorkingCopies | None = None
        """Weights in bf16; None if autocast or fsdp2 casts them."""
        self.no_copies_reason: str | None = None
        """Reason why autocast casts weights in every micro-batch; None otherwise."""
        if self._bf16:
            # The last layer's queries have another input than its keys.
            last = (
                [self.layers[-1].get_submodule("attention.self.query")]
                if self.has_sparse_last_layer and layout == "bert"
                else ()
            )
            self._compute_in_bf16(config, alone=last)
        if config.float8 != "none":
            precision.check_float8(
                config, model.device, copies=self.working_copies is not None
            )
            precision.use_float8(self.layers, config.float8)
        for name, part in model.named_modules():
            if layout is not None and name.endswith("token_type_embeddings"):
                part.forward = functools.partial(_first_row, part)

    def _compute_in_bf16(self, config: TrainConfig, alone: Sequence[nn.Module]) -> None:
        # Gathers weights in bf16, those of layer norms too.
        sharded = config.parallel.strategy == "fsdp2"
        if sharded or self.residual_dtype == torch.bfloat16:
            precision.set_residual_dtype(self.model, self.residual_dtype)
        if self.residual_dtype == torch.bfloat16:
            # Embeddings may end without a layer norm.
            self.layers[0].register_forward_pre_hook(
                lambda _, args: (args[0].bfloat16(), *args[1:])
            )
        if config.compiled:
            precision.keep_norms_in_bf16(self.layers, self.residual_dtype)
        if not sharded:
            self.no_copies_reason = verify_working_copies(self.model.config)
            self.working_copies = (
                precision.WorkingCopies(self.model, alone)
                if self.no_copies_reason is None
                else None
            )

    def weights_changed(self) -> None:
        """Cast the weights again; call this after every change of them."""
        if self.working_copies is not None:
            self.working_copies.refresh()

    def _autocast(self, device_type: str) -> torch.autocast:
        # torch.autocast rejects the meta device, which computes nothing.
        on = self._bf16 and device_type != "meta"
        return torch.autocast(
            device_type if on else "cpu", dtype=torch.bfloat16, enabled=on
        )

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        """Return the summed cross-entropy of predicted tokens in nats, fp32, shape (), for a batch on the device."""
        if self._replays_graphs:
            # The results of earlier micro-batches may be overwritten.
            torch.compiler.cudagraph_mark_step_begin()
        if self.fused_loss is None:
            logits_KV, labels_K = self._predict(batch)
            return self.loss(logits_KV, labels_K)
        hidden_KD, labels_K = self._hidden(batch)
        of_layer = precision.compute_weights(self._decoder)
        weight_VD, bias_V = (
            None if one is None else one.to(self._dtype) for one in of_layer
        )
        return self.fused_loss(hidden_KD.to(self._dtype), weight_VD, labels_K, bias_V)

    def evaluate(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the summed cross-entropy, as ``forward``, and hits, int64, shapes (), for a batch on the device."""
        if self.fused_loss is None:
            return _loss_and_hits(*self._predict(batch))
        # All logits at once would take the memory that training saves.
        parts = zip(
            *(one.split(EVALUATION_CHUNK_POSITIONS) for one in self._hidden(batch)),
            strict=True,
        )
        with self.autocast(batch.ids_BS.device.type):
            found = [
                _loss_and_hits(self._decoder(hidden_KD), labels_K)
                for hidden_KD, labels_K in parts
            ]
        losses, hits = zip(*found, strict=True)
        return torch.stack(losses).sum(), torch.stack(hits).sum()

    @property
    def _decoder(self) -> Any:
        return self.model.get_output_embeddings()

    def _hidden(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the input of the head's last layer, shape (K, D), and labels."""
        vars(self._decoder)["forward"] = nn.Identity().forward
        try:
            return self._predict(batch)
        finally:
            del vars(self._decoder)["forward"]

    def _predict(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits and labels, of the head's slots or of all positions."""
        segments = (
            self._enough_segments(batch) if self.attention.uses_document_edges else 0
        )
        with self.autocast(batch.ids_BS.device.type):
            inputs = encoder_inputs(
                batch,
                self.attention.kind,
                self.attention.packing,
                self.model,
                dtype=self._dtype,
                window_tokens=self._window_tokens,
                segments=segments,
            )
            if not self._masked_head:
                return self._all_logits(inputs), batch.labels_BS().flatten()
            begins_N, fixed = batch.starts_N[:0], self._slots
            if (
                self.has_sparse_last_layer
                and self.attention.kind == "fa3"
                and inputs.edges is not None
            ):
                # Each segment needs a query, as the backward pass hangs on empty ones.
                begins_N = inputs.edges[:-1]
                fixed = (
                    fixed and fixed + -(-segments // SLOTS_MULTIPLE) * SLOTS_MULTIPLE
                )
            slots = _enough(fixed, batch.predicted_tokens + len(begins_N))
            self.overflows += fixed is not None and slots > fixed
            position_K, labels_K = _slots(
                batch, slots, begins_N, ascending=self.attention.uses_document_edges
            )
            return self._logits_at(position_K, inputs, batch), labels_K

    def _logits_at(
        self, position_K: torch.Tensor, inputs: EncoderInputs, batch: MicroBatch
    ) -> torch.Tensor:
        if self.attention.kind == "row":
            return self._all_logits(inputs).index_select(0, position_K)
        asked: dict[str, LastLayerQueries] = {}
        if self.has_sparse_last_layer and self.attention.uses_document_edges:
            asked["asked"] = document_queries(
                inputs, batch, position_K, self.attention.kind
            )
        elif self.has_sparse_last_layer:
            slots = _enough(self._sequence_slots, batch.most_predicted_in_sequence)
            asked["asked"] = sequence_queries(
                inputs, batch, position_K, sequence_slots=slots, dtype=self._dtype
            )
        with head_inputs(
            self.model, None if self.has_sparse_last_layer else position_K
        ):
            return self._all_logits(inputs, **asked)

    def expect_documents(self, batch: MicroBatch) -> None:
        """Reserve segments for micro-batches that are packed as unevenly as ``batch``, which is on the CPU."""
        rows, width = batch.ids_BS.shape
        by_sequence = torch.bincount(batch.starts_N // width, minlength=rows).float()
        self._segments = self._most_segments(
            batch, float(by_sequence.std(correction=0))
        )

    def _most_segments(self, batch: MicroBatch, deviation: float) -> int:
        documents, rows = len(batch.starts_N), batch.ids_BS.shape[0]
        if not self._packed:
            return 2 * rows  # each sequence has a document, and maybe padding
        # At least half the mean per sequence; six standard deviations are added for the
        # sum.
        most = documents + 6 * max(deviation, documents / rows / 2) * math.sqrt(rows)
        return -(-round(most) // 64) * 64 + rows

    def _enough_segments(self, batch: MicroBatch) -> int:
        documents, rows = len(batch.starts_N), batch.ids_BS.shape[0]
        if self._segments is None:
            self._segments = self._most_segments(batch, 0.0)
        segments = _enough(self._segments, documents + rows)
        self.overflows += segments > self._segments
        return segments

    def _all_logits(
        self, inputs: EncoderInputs, **asked: LastLayerQueries
    ) -> torch.Tensor:
        logits: torch.Tensor = self.model(**inputs.arguments, **asked).logits
        return logits.flatten(0, 1)


def _loss_and_hits(
    logits_KV: torch.Tensor, labels_K: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        cross_entropy(logits_KV, labels_K),
        (logits_KV.argmax(dim=1) == labels_K).sum(),
    )


def _first_row(embedding: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return an embedding's first row for every id, as all are 0.

    The backward pass of a look-up would sort them.
    """
    row: torch.Tensor = embedding.weight[0]  # type: ignore[index]
    return row.expand(*ids.shape, -1)


def _enough(slots: int | None, needed: int) -> int:
    """Return a multiple of the fixed number of slots.

    Without one, the number needed.
    """
    return (
        max(1, needed) if slots is None else slots * max(1, math.ceil(needed / slots))
    )


def _slots(
    batch: MicroBatch, slots: int, begins_N: torch.Tensor, *, ascending: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return positions and labels, shapes (K,): those to predict, then unused slots, or both sorted by position."""
    places, unused = batch.ids_BS.numel(), slots - batch.predicted_tokens
    # At the given positions, and spread evenly over the sequences.
    spread = torch.linspace(
        0, places - 1, unused - len(begins_N), dtype=torch.int64, device=begins_N.device
    )
    position_K = torch.cat(
        [batch.predicted_P.to(torch.int64), begins_N.to(torch.int64), spread]
    )
    labels_K = functional.pad(
        batch.targets_P.to(torch.int64), (0, unused), value=IGNORED_LABEL
    )
    if not ascending:
        return position_K, labels_K
    order_K = position_K.argsort(stable=True)
    return position_K[order_K], labels_K[order_K]


def _check_fused(config: TrainConfig, model: PreTrainedModel) -> None:
    """Raise ``BadConfig`` if the head's last layer and the loss cannot be computed in one function."""
    decoder = model.get_output_embeddings()
    ids = (model.config.vocab_size,)
    biases = [
        one
        for part in model_head(model)
        for one in part.parameters()
        if one.shape == ids
    ]
    last = isinstance(decoder, nn.Linear) and all(one is decoder.bias for one in biases)
    precision.require(
        "fused_cross_entropy=false",
        "liger_kernel",
        "liger",
        (
            (config.device == "cuda", "requires a GPU", ""),
            (
                config.mlm_head == "sparse",
                "requires a sparse MLM head",
                "mlm_head=sparse",
            ),
            (
                config.parallel.strategy != "fsdp2",
                "cannot be used with fsdp2",
                "parallel.strategy=zero1",
            ),
            (
                last,
                (
                    f"cannot be used with {model.config.model_type!r}, whose head does"
                    " not end in a linear layer"
                ),
                "",
            ),
        ),
    )
