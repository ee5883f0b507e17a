"""Masked-LM loss of a micro-batch: encoder, MLM head and cross-entropy.

Shapes: B sequences, S positions of a sequence, D hidden, P tokens to predict, K slots
of the head, V ids.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from trainer.data.micro_batch import MicroBatch
from trainer.formats.families import FAMILIES, LayerLayout
from trainer.formats.train_config import TrainConfig
from trainer.model.attention import ChosenAttention
from trainer.model.encoder import head_inputs, model_layers
from trainer.model.encoder_config import window_tokens
from trainer.model.encoder_inputs import EncoderInputs, encoder_inputs
from trainer.model.fixed_sizes import FixedSizes
from trainer.model.float8 import check_float8, use_float8
from trainer.model.fused_loss import check_fused_loss, liger_cross_entropy
from trainer.model.fused_norms import DropoutSeeds, check_fused_norms, fuse_norms
from trainer.model.gelu_epilogues import check_gelu_epilogues, use_gelu_epilogues
from trainer.model.last_layer_queries import (
    LastLayerQueries,
    document_queries,
    sequence_queries,
)
from trainer.model.layer_norms import keep_norms_in_bf16, set_residual_dtype
from trainer.model.loss import cross_entropy, cross_entropy_in_place
from trainer.model.sparse_last_layer import make_sparse_layer
from trainer.model.varlen_kernels import VarlenKernels, fastest_kernels
from trainer.model.verify_copies import verify_working_copies
from trainer.model.working_copies import (
    WorkingCopies,
    compute_weights,
    keep_joined,
)

EVALUATION_CHUNK_POSITIONS = 4096
"""Positions whose logits evaluation holds at once if training holds no logits."""


class MaskedLM(nn.Module):
    """A transformers encoder with its loss.

    This is the module that is wrapped, compiled and sharded.

    The sparse MLM head computes only the positions to predict, 15 % of all, with the
    loss and gradients of the dense head. These positions fill slots, whose number is
    fixed if shapes must not change (compiled layers, GPUs); unused slots add no loss.

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
        self.layers = () if attention.kind == "row" else model_layers(model)
        """Layers of the encoder, to compile and shard one at a time; empty if the
        architecture cannot be packed."""
        self.autocast: Callable[[str], AbstractContextManager[None]] = self._autocast
        """Function that returns, for a type of device, the context in which encoder and
        head are computed."""
        self.loss = _loss_from_logits(config)
        """Function that returns the loss of logits and labels."""
        self.fused_loss = _loss_without_logits(config, model)
        """Function that returns the loss of the input, weight and bias of the head's
        last layer, and labels; None if the loss is computed from logits."""
        self.fixed_sizes = FixedSizes.from_config(config)
        """Numbers of slots and segments that micro-batches hardly exceed."""
        self.varlen_kernels: VarlenKernels | None = None
        """Kernels of fa4, from the first micro-batch on; None for other kinds."""
        self.has_sparse_last_layer = False
        """True if the last layer is computed at the positions to predict only."""
        self.working_copies: WorkingCopies | None = None
        """Weights in bf16; None in fp32, or if autocast or fsdp2 casts them."""
        self.no_copies_reason: str | None = None
        """Reason why autocast casts weights in every micro-batch; None otherwise."""
        self.dropout_seeds: DropoutSeeds | None = None
        """Seeds of the dropout that fused norms compute; None without these."""
        self._is_bf16 = config.precision == "bf16"
        self._dtype = torch.bfloat16 if self._is_bf16 else model.dtype
        """Type in which matmuls are computed."""
        self.residual_dtype = torch.float32
        """Type of the residual stream."""
        if self._is_bf16 and config.residual_dtype == "bf16":
            self.residual_dtype = torch.bfloat16
        self._has_sparse_head = config.mlm_head == "sparse"
        self._window_tokens = window_tokens(model.config)
        self._replays_graphs = (
            config.compiled and config.compile_mode == "reduce-overhead"
        )

        # The order matters: a sparse last layer decides which weights share a copy in
        # bf16, and float8 computes with these copies.
        layer_layout = FAMILIES.get(model.config.model_type)
        if layer_layout is not None and self._allows_sparse_last_layer(config):
            make_sparse_layer(self.layers[-1], layer_layout)
            self.has_sparse_last_layer = True
        if self._is_bf16:
            self._compute_in_bf16(config, layer_layout)
        if config.float8 != "none":
            check_float8(
                config, model.device, has_copies=self.working_copies is not None
            )
            use_float8(self.layers, config.float8)
        self._use_own_kernels(config, layer_layout)
        if layer_layout is not None:
            self._skip_token_type_lookups()

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

    def _compute_in_bf16(
        self, config: TrainConfig, layer_layout: LayerLayout | None
    ) -> None:
        """Let layer norms and linear layers compute in bf16."""
        is_sharded = config.parallel.strategy == "fsdp2"
        self._set_layer_norms(config, is_sharded=is_sharded)
        # fsdp2 gathers weights in bf16 itself.
        if not is_sharded:
            self._make_working_copies(layer_layout)

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

    def _make_working_copies(self, layer_layout: LayerLayout | None) -> None:
        self.no_copies_reason = verify_working_copies(self.model.config)
        if self.no_copies_reason is not None:
            return
        ungrouped: list[nn.Module] = []
        if self.has_sparse_last_layer and layer_layout == "bert":
            # The last layer's queries have another input than its keys.
            ungrouped = [self.layers[-1].get_submodule("attention.self.query")]
        self.working_copies = WorkingCopies(self.model, ungrouped)
        if layer_layout == "bert" and self.attention.kind == "fa4":
            # Layers of this layout pass queries, keys and values on as they are.
            for layer in self.layers:
                attention = layer.get_submodule("attention.self")
                keep_joined(attention.get_submodule("query"))
                keep_joined(attention.get_submodule("key"))

    def _use_own_kernels(
        self, config: TrainConfig, layer_layout: LayerLayout | None
    ) -> None:
        """Let Triton kernels of this package compute parts of the layers, if asked."""
        if config.gelu_epilogues:
            check_gelu_epilogues(
                config,
                self.model.config,
                device=self.model.device,
                has_copies=self.working_copies is not None,
            )
            use_gelu_epilogues(self.layers)
        if config.fused_norms:
            check_fused_norms(
                config,
                layer_layout,
                hidden_size=self.model.config.hidden_size,
                device=self.model.device,
            )
            self.dropout_seeds = fuse_norms(self.layers)

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
        # Without that layer, its input becomes the model's logits.
        with _skipped(self._decoder):
            return self._predict(batch)

    def _predict(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits, shape (K, V), and labels, shape (K,).

        With a dense head, all positions are slots.
        """
        if self.dropout_seeds is not None and self.training:
            self.dropout_seeds.draw(batch.ids_BS.device)
        segments = 0
        if self.attention.uses_document_edges:
            segments = self.fixed_sizes.segments_for(batch)
        with self.autocast(batch.ids_BS.device.type):
            inputs = encoder_inputs(
                batch,
                self.attention.kind,
                self.attention.packing,
                self.model,
                dtype=self._dtype,
                window_tokens=self._window_tokens,
                segments=segments,
                kernels=self._kernels_for(batch),
            )
            if not self._has_sparse_head:
                return self._model_logits(inputs), batch.labels_BS().flatten()
            self.fixed_sizes.count_slots(batch)
            return self._logits_of_slots(inputs, batch), batch.slot_label_K

    def _kernels_for(self, batch: MicroBatch) -> VarlenKernels | None:
        """Return the kernels of fa4, which the first micro-batch fixes.

        Returns:
            The fastest kernels for its documents; None for other kinds of attention.
        """
        if self.attention.kind == "fa4" and self.varlen_kernels is None:
            documents = max(1, len(batch.starts_N))
            self.varlen_kernels = fastest_kernels(batch.non_padding_tokens / documents)
        return self.varlen_kernels

    def _logits_of_slots(
        self, inputs: EncoderInputs, batch: MicroBatch
    ) -> torch.Tensor:
        """Return the logits of the head's slots, shape (K, V)."""
        if self.attention.kind == "row":
            return self._model_logits(inputs).index_select(0, batch.slot_position_K)
        if not self.has_sparse_last_layer:
            with head_inputs(self.model, batch.slot_position_K):
                return self._model_logits(inputs)
        queries = self._last_layer_queries(inputs, batch)
        return self._model_logits(inputs, queries)

    def _last_layer_queries(
        self, inputs: EncoderInputs, batch: MicroBatch
    ) -> LastLayerQueries:
        """Return the queries of the head's slots, for the kind of attention."""
        if self.attention.uses_document_edges:
            return document_queries(inputs, batch, self.varlen_kernels)
        sequence_slots = self.fixed_sizes.sequence_slots_for(
            batch.most_predicted_in_sequence
        )
        return sequence_queries(batch, sequence_slots=sequence_slots, dtype=self._dtype)

    def _model_logits(
        self, inputs: EncoderInputs, queries: LastLayerQueries | None = None
    ) -> torch.Tensor:
        """Return the logits of the positions that the head gets, shape (K, V).

        Without ``queries`` or ``head_inputs``, it gets all positions.
        """
        arguments = inputs.arguments
        if queries is not None:
            arguments = arguments | {"last_layer_queries": queries}
        logits: torch.Tensor = self.model(**arguments).logits
        return logits.flatten(0, 1)


def _loss_from_logits(config: TrainConfig) -> Callable[..., torch.Tensor]:
    """Return the function that computes the loss of logits and labels."""
    if not config.compiled:
        return cross_entropy
    return cross_entropy_in_place(functools.partial(torch.compile, dynamic=False))


def _loss_without_logits(
    config: TrainConfig, model: PreTrainedModel
) -> Callable[..., torch.Tensor] | None:
    """Return the function that computes head and loss in one, if configured.

    Raises:
        BadConfig: If this model's head and loss cannot be computed in one.
    """
    if not config.fused_cross_entropy:
        return None
    check_fused_loss(config, model)
    return liger_cross_entropy


@contextlib.contextmanager
def _skipped(layer: nn.Module) -> Iterator[None]:
    """Let a layer return its input as long as the context is open."""
    # The attribute of the instance hides the method of its class.
    layer.forward = nn.Identity().forward
    try:
        yield
    finally:
        del layer.forward


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
