"""Masked-LM loss of a micro-batch: encoder, MLM head and cross-entropy.

Shapes: B sequences, S positions of a sequence, D hidden, P tokens to predict, K slots
of the head, N documents, V ids.
"""

import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from trainer.config.train_config import TrainConfig
from trainer.data.head_slots import SLOTS_MULTIPLE, head_slots
from trainer.data.masking import IGNORED_LABEL
from trainer.data.micro_batch import MicroBatch
from trainer.model.attention import ChosenAttention
from trainer.model.encoder import head_inputs, model_layers
from trainer.model.encoder_config import window_tokens
from trainer.model.encoder_inputs import EncoderInputs, encoder_inputs
from trainer.model.families import FAMILIES, LayerLayout
from trainer.model.float8 import check_float8, use_float8
from trainer.model.fused_loss import check_fused_loss, liger_cross_entropy
from trainer.model.last_layer_queries import (
    LastLayerQueries,
    document_queries,
    sequence_queries,
)
from trainer.model.layer_norms import keep_norms_in_bf16, set_residual_dtype
from trainer.model.loss import cross_entropy, cross_entropy_in_place
from trainer.model.sparse_last_layer import make_sparse_layer
from trainer.model.verify_copies import verify_working_copies
from trainer.model.working_copies import WorkingCopies, compute_weights

EVALUATION_CHUNK_POSITIONS = 4096
"""Positions whose logits evaluation holds at once if training holds no logits."""
_SEGMENTS_MULTIPLE = 64
"""Multiple to which the number of documents is rounded up, so that few shapes occur."""
_DOCUMENT_SIGMAS = 6
"""Standard deviations by which the reserved number of documents exceeds the expected
one: one micro-batch in a billion has more, if their numbers are normal."""


class MaskedLM(nn.Module):
    """A transformers encoder with its loss.

    This is the module that is wrapped, compiled and sharded.

    The sparse MLM head computes only the positions to predict, 15 % of all, with the
    loss and gradients of the dense head. If shapes must not change (compiled layers,
    GPUs), it has a fixed number of slots, and unused slots add no loss. A micro-batch
    with more tokens to predict uses a multiple of this number, and is counted in
    ``overflows``. The number of segments of varlen attention is fixed in the same way.

    Args:
        model: The encoder with its MLM head, on its device.
        config: Configuration of the training.
        attention: The attention that the model was built for.
    """

    def __init__(
        self, model: PreTrainedModel, config: TrainConfig, attention: ChosenAttention
    ) -> None:
        super().__init__()
        self.model = model
        self.attention = attention
        """Attention that the encoder computes."""
        self.overflows = 0
        """Micro-batches that needed more than the fixed number of slots or segments."""
        self.layers = () if attention.kind == "row" else model_layers(model)
        """Layers of the encoder, to compile and shard one at a time; empty if the
        architecture cannot be packed."""
        self.autocast: Callable[[str], AbstractContextManager[None]] = self._autocast
        """Function that returns, for a type of device, the context in which encoder and
        head are computed."""
        self._has_sparse_head = config.mlm_head == "sparse"
        self._is_packed = config.layout == "packed"
        self._window_tokens = window_tokens(model.config)
        self._replays_graphs = (
            config.compiled and config.compile_mode == "reduce-overhead"
        )
        self._set_dtypes(config)
        self._choose_loss(config)
        self._set_fixed_numbers(config)

        # The order matters: a sparse last layer decides which weights share a copy in
        # bf16, and float8 computes with these copies.
        layout = FAMILIES.get(model.config.model_type)
        self._make_last_layer_sparse(config, layout)
        self._compute_in_bf16(config, layout)
        self._compute_in_float8(config)
        if layout is not None:
            self._skip_token_type_lookups()

    def _set_dtypes(self, config: TrainConfig) -> None:
        self._is_bf16 = config.precision == "bf16"
        self._dtype = torch.bfloat16 if self._is_bf16 else self.model.dtype
        """Type in which matmuls are computed."""
        self.residual_dtype = torch.float32
        """Type of the residual stream."""
        if self._is_bf16 and config.residual_dtype == "bf16":
            self.residual_dtype = torch.bfloat16

    def _choose_loss(self, config: TrainConfig) -> None:
        self.loss: Callable[..., torch.Tensor] = cross_entropy
        """Loss from logits and labels."""
        if config.compiled:
            self.loss = cross_entropy_in_place(
                functools.partial(torch.compile, dynamic=False)
            )
        self.fused_loss: Callable[..., torch.Tensor] | None = None
        """Loss from the input, weight and bias of the head's last layer, and labels:
        without logits. None if the loss is computed from logits."""
        if config.fused_cross_entropy:
            check_fused_loss(config, self.model)
            self.fused_loss = liger_cross_entropy

    def _set_fixed_numbers(self, config: TrainConfig) -> None:
        """Fix the numbers that shapes depend on, if shapes must not change."""
        self._fixed_slots: int | None = None
        """Slots of the head for a micro-batch; None if shapes may change."""
        self._fixed_sequence_slots: int | None = None
        """Slots of the sparse last layer for each sequence; None if shapes may
        change."""
        self._fixed_segments: int | None = None
        """Segments of varlen attention that micro-batches hardly exceed; None before
        the first micro-batch."""
        if config.compiled or config.device == "cuda":
            positions = config.micro_batch_size * config.seq_length_tokens
            self._fixed_slots = head_slots(positions, config.masking_probability)
            self._fixed_sequence_slots = head_slots(
                config.seq_length_tokens, config.masking_probability
            )

    def _make_last_layer_sparse(
        self, config: TrainConfig, layout: LayerLayout | None
    ) -> None:
        """Make the last layer sparse if the configuration and its layout allow it."""
        self.has_sparse_last_layer = False
        """True if the last layer is computed at the positions to predict only."""
        if layout is not None and self._allows_sparse_last_layer(config):
            make_sparse_layer(self.layers[-1], layout)
            self.has_sparse_last_layer = True

    def _allows_sparse_last_layer(self, config: TrainConfig) -> bool:
        """Return True if the last layer of this configuration may be sparse."""
        layer_types = getattr(self.model.config, "layer_types", None)
        if not layer_types:
            layer_types = ["full_attention"]
        return (
            config.mlm_head == "sparse"
            and config.last_layer == "sparse"
            and self.attention.kind != "row"
            and layer_types[-1] == "full_attention"
        )

    def _compute_in_bf16(self, config: TrainConfig, layout: LayerLayout | None) -> None:
        """Let layer norms and linear layers compute in bf16, if configured."""
        self.working_copies: WorkingCopies | None = None
        """Weights in bf16; None in fp32, or if autocast or fsdp2 casts them."""
        self.no_copies_reason: str | None = None
        """Reason why autocast casts weights in every micro-batch; None otherwise."""
        if not self._is_bf16:
            return
        is_sharded = config.parallel.strategy == "fsdp2"
        self._set_layer_norms(config, is_sharded=is_sharded)
        # fsdp2 gathers weights in bf16 itself.
        if not is_sharded:
            self._make_working_copies(layout)

    def _set_layer_norms(self, config: TrainConfig, *, is_sharded: bool) -> None:
        """Set the types of the residual stream and of the inputs that norms keep."""
        # fsdp2 gathers the weights of layer norms in bf16 too.
        if is_sharded or self.residual_dtype == torch.bfloat16:
            set_residual_dtype(self.model, self.residual_dtype)
        if self.residual_dtype == torch.bfloat16:
            # Embeddings may end without a layer norm.
            self.layers[0].register_forward_pre_hook(
                lambda _, args: (args[0].bfloat16(), *args[1:])
            )
        if config.compiled:
            keep_norms_in_bf16(self.layers, self.residual_dtype)

    def _make_working_copies(self, layout: LayerLayout | None) -> None:
        self.no_copies_reason = verify_working_copies(self.model.config)
        if self.no_copies_reason is not None:
            return
        ungrouped: list[nn.Module] = []
        if self.has_sparse_last_layer and layout == "bert":
            # The last layer's queries have another input than its keys.
            ungrouped = [self.layers[-1].get_submodule("attention.self.query")]
        self.working_copies = WorkingCopies(self.model, ungrouped)

    def _compute_in_float8(self, config: TrainConfig) -> None:
        if config.float8 == "none":
            return
        check_float8(
            config, self.model.device, has_copies=self.working_copies is not None
        )
        use_float8(self.layers, config.float8)

    def _skip_token_type_lookups(self) -> None:
        """Replace look-ups of token types, which are all 0."""
        for name, part in self.model.named_modules():
            if name.endswith("token_type_embeddings"):
                part.forward = functools.partial(_expand_first_vector, part)

    def weights_changed(self) -> None:
        """Update the working copies; call this after every change of the weights."""
        if self.working_copies is not None:
            self.working_copies.refresh()

    def _autocast(self, device_type: str) -> torch.autocast:
        """Return the default of ``autocast``."""
        # torch.autocast rejects the meta device, which computes nothing.
        is_enabled = self._is_bf16 and device_type != "meta"
        return torch.autocast(
            device_type if is_enabled else "cpu",
            dtype=torch.bfloat16,
            enabled=is_enabled,
        )

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        """Return the summed cross-entropy of predicted tokens in nats.

        Args:
            batch: The micro-batch, on the device of the model.

        Returns:
            The loss in fp32, shape ().
        """
        if self._replays_graphs:
            # The results of earlier micro-batches may be overwritten.
            torch.compiler.cudagraph_mark_step_begin()
        if self.fused_loss is None:
            logits_KV, labels_K = self._predict(batch)
            return self.loss(logits_KV, labels_K)
        hidden_KD, labels_K = self._hidden(batch)
        weight_VD, bias_V = compute_weights(self._decoder)
        weight_VD = weight_VD.to(self._dtype)
        if bias_V is not None:
            bias_V = bias_V.to(self._dtype)
        return self.fused_loss(hidden_KD.to(self._dtype), weight_VD, labels_K, bias_V)

    def evaluate(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the summed cross-entropy, as ``forward`` does, and the number of hits.

        Args:
            batch: The micro-batch, on the device of the model.

        Returns:
            The loss, and the number of tokens whose largest logit is the label's,
            int64; both have shape ().
        """
        if self.fused_loss is None:
            return _loss_and_hits(*self._predict(batch))
        return self._evaluate_in_chunks(batch)

    def _evaluate_in_chunks(
        self, batch: MicroBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # All logits at once would take the memory that training saves.
        hidden_KD, labels_K = self._hidden(batch)
        chunks = zip(
            hidden_KD.split(EVALUATION_CHUNK_POSITIONS),
            labels_K.split(EVALUATION_CHUNK_POSITIONS),
            strict=True,
        )
        losses: list[torch.Tensor] = []
        hits: list[torch.Tensor] = []
        with self.autocast(batch.ids_BS.device.type):
            for chunk_hidden_KD, chunk_labels_K in chunks:
                loss, chunk_hits = _loss_and_hits(
                    self._decoder(chunk_hidden_KD), chunk_labels_K
                )
                losses.append(loss)
                hits.append(chunk_hits)
        return torch.stack(losses).sum(), torch.stack(hits).sum()

    @property
    def _decoder(self) -> Any:
        return self.model.get_output_embeddings()

    def _hidden(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the input of the head's last layer, shape (K, D), and labels."""
        # While the last layer passes its input on, the model's logits are that input.
        # The attribute of the instance hides the method of its class.
        vars(self._decoder)["forward"] = nn.Identity().forward
        try:
            return self._predict(batch)
        finally:
            del vars(self._decoder)["forward"]

    def _predict(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits, shape (K, V), and labels, shape (K,).

        With a dense head, all positions are slots.
        """
        segments = 0
        if self.attention.uses_document_edges:
            segments = self._enough_segments(batch)
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
            if not self._has_sparse_head:
                return self._all_logits(inputs), batch.labels_BS().flatten()
            position_K, labels_K = self._fill_slots(batch, inputs, segments)
            return self._logits_at(position_K, inputs, batch), labels_K

    def _fill_slots(
        self, batch: MicroBatch, inputs: EncoderInputs, segments: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the positions and labels of the head's slots, shapes (K,)."""
        # Only the positions to predict need a slot.
        begins_N = batch.starts_N.new_empty(0)
        fixed_slots = self._fixed_slots
        if (
            self.has_sparse_last_layer
            and self.attention.kind == "fa3"
            and inputs.edges is not None
        ):
            # Each segment needs a query too, as the backward pass hangs on empty ones.
            begins_N = inputs.edges[:-1]
            if fixed_slots is not None:
                fixed_slots += _round_up(segments, SLOTS_MULTIPLE)
        slots = _sufficient_number(
            batch.predicted_tokens + len(begins_N), fixed=fixed_slots
        )
        if fixed_slots is not None and slots > fixed_slots:
            self.overflows += 1
        return _positions_and_labels(
            batch, slots, begins_N, ascending=self.attention.uses_document_edges
        )

    def _logits_at(
        self, position_K: torch.Tensor, inputs: EncoderInputs, batch: MicroBatch
    ) -> torch.Tensor:
        """Return the logits of the head's slots, shape (K, V)."""
        if self.attention.kind == "row":
            return self._all_logits(inputs).index_select(0, position_K)
        if not self.has_sparse_last_layer:
            with head_inputs(self.model, position_K):
                return self._all_logits(inputs)
        queries = self._last_layer_queries(position_K, inputs, batch)
        return self._all_logits(inputs, queries)

    def _last_layer_queries(
        self, position_K: torch.Tensor, inputs: EncoderInputs, batch: MicroBatch
    ) -> LastLayerQueries:
        """Return the queries of the head's slots, for the kind of attention."""
        if self.attention.uses_document_edges:
            return document_queries(inputs, batch, position_K, self.attention.kind)
        sequence_slots = _sufficient_number(
            batch.most_predicted_in_sequence, fixed=self._fixed_sequence_slots
        )
        return sequence_queries(
            inputs,
            batch,
            position_K,
            sequence_slots=sequence_slots,
            dtype=self._dtype,
        )

    def _all_logits(
        self, inputs: EncoderInputs, queries: LastLayerQueries | None = None
    ) -> torch.Tensor:
        """Return the logits of all positions that the head gets, shape (K, V)."""
        arguments = inputs.arguments
        if queries is not None:
            arguments = arguments | {"last_layer_queries": queries}
        logits: torch.Tensor = self.model(**arguments).logits
        return logits.flatten(0, 1)

    def expect_documents(self, batch: MicroBatch) -> None:
        """Reserve segments for micro-batches that are packed as unevenly as this one.

        Args:
            batch: A micro-batch of the training, on the CPU.
        """
        sequences, width = batch.ids_BS.shape
        documents_B = torch.bincount(batch.starts_N // width, minlength=sequences)
        deviation = float(documents_B.float().std(correction=0))
        self._fixed_segments = self._max_segments(batch, deviation)

    def _max_segments(self, batch: MicroBatch, deviation: float) -> int:
        """Return a number of segments that micro-batches hardly exceed.

        Args:
            batch: One of the micro-batches.
            deviation: Standard deviation of the number of documents in a sequence.
        """
        documents = len(batch.starts_N)
        sequences = batch.ids_BS.shape[0]
        if not self._is_packed:
            return 2 * sequences  # a document in each sequence, and perhaps padding
        # One batch may be packed evenly by chance, so the deviation is taken to be at
        # least half the mean. The deviation of the sum over sequences grows with the
        # root of their number.
        deviation = max(deviation, documents / sequences / 2)
        max_documents = documents + _DOCUMENT_SIGMAS * deviation * math.sqrt(sequences)
        # The padding of each sequence is one more segment.
        return _round_up(round(max_documents), _SEGMENTS_MULTIPLE) + sequences

    def _enough_segments(self, batch: MicroBatch) -> int:
        """Return a sufficient number of segments for a micro-batch and its padding.

        A micro-batch that needs more than the fixed number is counted.
        """
        if self._fixed_segments is None:
            self._fixed_segments = self._max_segments(batch, deviation=0.0)
        segments = _sufficient_number(
            len(batch.starts_N) + batch.ids_BS.shape[0], fixed=self._fixed_segments
        )
        if segments > self._fixed_segments:
            self.overflows += 1
        return segments


def _loss_and_hits(
    logits_KV: torch.Tensor, labels_K: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the results of ``evaluate`` for these logits."""
    loss = cross_entropy(logits_KV, labels_K)
    hits = (logits_KV.argmax(dim=1) == labels_K).sum()
    return loss, hits


def _expand_first_vector(embedding: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return an embedding's first vector for every id, as all ids are 0.

    A look-up would sort the ids in its backward pass.
    """
    vector_D: torch.Tensor = embedding.weight[0]  # type: ignore[index]
    return vector_D.expand(*ids.shape, -1)


def _round_up(number: int, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple


def _sufficient_number(needed: int, *, fixed: int | None) -> int:
    """Return the number of slots or segments to compute, at least 1 and ``needed``.

    It is a multiple of the fixed number, so that few different shapes occur. Without a
    fixed number, only the needed ones are computed.
    """
    if fixed is None:
        return max(1, needed)
    return fixed * max(1, math.ceil(needed / fixed))


def _positions_and_labels(
    batch: MicroBatch, slots: int, begins_N: torch.Tensor, *, ascending: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions and labels of the head's slots, shapes (K,).

    Args:
        batch: The micro-batch.
        slots: Number of slots.
        begins_N: Positions at which some of the unused slots must be.
        ascending: True to sort slots by position. If False, the slots of tokens to
            predict come first, then the unused slots.
    """
    unused = slots - batch.predicted_tokens
    # Other unused slots are spread evenly over the sequences.
    spread = torch.linspace(
        0,
        batch.ids_BS.numel() - 1,
        unused - len(begins_N),
        dtype=torch.int64,
        device=begins_N.device,
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
