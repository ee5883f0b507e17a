"""Verification that documents can share a sequence.

A small copy of an encoder computes two documents packed, and each alone.

Shapes: S positions of a sequence, T = S, H heads, E dimensions of a head, K positions
given to the head.
"""

import copy
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import cast

import torch
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes
from transformers import (
    AttentionInterface,
    AutoConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from trainer.data.micro_batch import MicroBatch
from trainer.errors import BadConfig
from trainer.model.attention import (
    AttentionKind,
    Packing,
    attend_within_documents,
    encoder_inputs,
)
from trainer.model.encoder import fresh_model, head_inputs, window_tokens
from trainer.model.precision import WorkingCopies

Ids = list[int]
_ATTENTION_NAME = "documents_of_probe"
"""Name under which transformers knows the attention function of this check."""
_FIRST_TOKENS = 7
_SECOND_TOKENS = 9
"""Tokens of the two documents: more than twice the window of ``_small_config``."""
_VOCAB_SIZE = 64
_MAX_PARAMETERS = 40_000_000
"""Limit of the small copy: some architectures have large parts besides the layers."""
_TOLERANCE = 1e-4
"""Largest difference of fp32 logits, as a share of the largest logit, from sums in
another order."""
_MODEL_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Errors of an architecture that gets arguments it does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ProbeDocuments:
    """Two documents, and another in place of each."""

    first: Ids
    second: Ids
    other_first: Ids
    other_second: Ids


def verify_packing(config: PretrainedConfig) -> Packing | str:
    """Return how an architecture takes packed sequences.

    The logits of packed documents must equal those of each document alone, with its
    padding mask as transformers builds it, and must not change by a single bit if all
    tokens of the other document do.

    Returns:
        How it takes them, or the reason why it cannot.
    """
    return cast("Packing | str", _check_small_copy(_check_packing, config))


def verify_working_copies(config: PretrainedConfig) -> str | None:
    """Check that an architecture can compute with working copies of its weights.

    Returns:
        The reason why it cannot, or None if it can.
    """
    return cast("str | None", _check_small_copy(_check_working_copies, config))


def _check_small_copy(
    check: Callable[[PreTrainedModel], object], config: PretrainedConfig
) -> object:
    """Return the result of a check of a small copy, or why there can be no copy."""
    # BigBird chooses its attention by length.
    if getattr(config, "attention_type", "original_full") != "original_full":
        return "its attention is sparse in sequences longer than a probe"
    reason = ""
    # Some architectures have sizes that depend on others, and fail if only some shrink.
    for narrow in (True, False):
        try:
            small = _small_config(config, narrow=narrow)
            return _check_built(check, small.to_json_string(use_diff=False))
        except (*_MODEL_ERRORS, BadConfig) as error:
            reason = f"a small copy of it cannot be computed ({_first_line(error)})"
    return reason


def _small_config(config: PretrainedConfig, *, narrow: bool) -> PretrainedConfig:
    """Return the config with few layers, one or more of each kind.

    ``narrow`` also leaves few heads, of the same size.
    """
    small = copy.deepcopy(config)
    small.num_hidden_layers = min(config.num_hidden_layers, 2)
    kinds = getattr(config, "layer_types", None)
    if kinds:
        each_kind = list(dict.fromkeys(kinds))
        small.layer_types = (each_kind * 2)[: max(2, len(each_kind))]
        small.num_hidden_layers = len(small.layer_types)
    if narrow:
        sizes = _narrow_sizes(config)
        for key in sizes.keys() & set(dir(config)):
            setattr(small, key, sizes[key])
    if window_tokens(config) is not None:
        small.sliding_window = 2
    special_ids = [
        value
        for key, value in vars(config).items()
        if key.endswith("_token_id") and isinstance(value, int)
    ]
    small.vocab_size = min(config.vocab_size, _VOCAB_SIZE + max(special_ids))
    return small


def _narrow_sizes(config: PretrainedConfig) -> dict[str, int]:
    """Return sizes of a narrow copy, by the keys that architectures give them."""
    heads = min(config.num_attention_heads, 2)
    key_heads = (
        getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    )
    has_grouped_queries = key_heads < config.num_attention_heads
    return {
        "hidden_size": config.hidden_size // config.num_attention_heads * heads,
        "num_attention_heads": heads,
        "num_key_value_heads": 1 if has_grouped_queries else heads,
        "intermediate_size": 64,
        "hidden_dim": 64,
    }


@functools.cache
def _check_built(check: Callable[[PreTrainedModel], object], small: str) -> object:
    """Return the result of a check of the model of this config, as JSON."""
    values = json.loads(small)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with _disable_current_modes():
        on_meta = fresh_model(config, torch.device("meta"))
        size = sum(parameter.numel() for parameter in on_meta.parameters())
    if size > _MAX_PARAMETERS:
        raise ValueError(f"even with few layers it has {size:,} parameters")
    # Outside of all modes, as a trace would record the probe, and with the generator
    # left as it was.
    with (
        torch._C.DisableTorchFunction(),
        _disable_current_modes(),
        torch.random.fork_rng([]),
    ):
        model = fresh_model(config, torch.device("cpu")).eval()
        for parameter in model.parameters():
            if parameter.requires_grad:
                _randomise(parameter.data)
        return check(model)


def _randomise(values: torch.Tensor) -> None:
    """Move values away from zeros, ones and small values.

    These would hide an influence.
    """
    if values.dim() > 1:
        values.normal_(std=2 * values.shape[-1] ** -0.5)
    else:
        values.add_(torch.randn_like(values), alpha=0.2)


@torch.no_grad()
def _check_packing(model: PreTrainedModel) -> Packing | str:
    AttentionInterface.register(
        _ATTENTION_NAME,
        functools.partial(attend_within_documents, attend=_attend_plainly),
    )
    documents = _probe_documents(model.config)
    expected = torch.cat(
        [
            _logits_alone(model, documents.first),
            _logits_alone(model, documents.second),
        ]
    )
    reasons: list[str] = []
    for needs_embeddings, first_position in product(
        (False, True), (0, model.config.pad_token_id + 1)
    ):
        packing = Packing(
            first_position=first_position, needs_embeddings=needs_embeddings
        )
        run_sdpa = functools.partial(_packed_logits, model, "sdpa", packing)
        sdpa_reason = _reason_against(run_sdpa, documents, expected)
        if sdpa_reason is None:
            model.config._attn_implementation = _ATTENTION_NAME
            run_varlen = functools.partial(_packed_logits, model, "varlen", packing)
            varlen_reason = _reason_against(run_varlen, documents, expected)
            return replace(packing, no_varlen_reason=varlen_reason)
        reasons.append(sdpa_reason)
    # The first one is of the usual way.
    return reasons[0]


def _check_working_copies(model: PreTrainedModel) -> str | None:
    # In fp32, logits and gradients must be those without copies.
    with_copies = copy.deepcopy(model)
    WorkingCopies(with_copies, dtype=torch.float32)
    # In bf16, autocast must accept them.
    in_bf16 = copy.deepcopy(model)
    for expected, actual in zip(
        _logits_and_gradient(model), _logits_and_gradient(with_copies), strict=True
    ):
        if not _is_close(actual, expected):
            return "its linear layers are called in another order, or with other inputs"
    WorkingCopies(in_bf16)
    with torch.autocast("cpu", torch.bfloat16):
        _logits_and_gradient(in_bf16)
    return None


def _is_close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return True if values are equal but for sums in another order; False for NaN."""
    error = (actual - expected).abs().max()
    return bool(error <= _TOLERANCE * expected.abs().max())


def _logits_and_gradient(
    model: PreTrainedModel,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of a document, and the gradient of the sum of their squares.

    The gradient is with respect to all parameters, flattened.
    """
    logits = _logits_alone(model, _probe_documents(model.config).first)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(
        logits.float().square().sum(), trained, materialize_grads=True
    )
    return logits, torch.cat([gradient.flatten() for gradient in gradients])


def _probe_documents(config: PretrainedConfig) -> _ProbeDocuments:
    """Return documents of ordinary tokens, with mask tokens at different positions."""
    special = {
        value for key, value in vars(config).items() if key.endswith("_token_id")
    }
    ordinary = [number for number in range(config.vocab_size) if number not in special]
    # Indexed, not sliced: a vocabulary that is too small raises an error.
    first = [ordinary[_FIRST_TOKENS + index] for index in range(_FIRST_TOKENS)]
    second = [ordinary[_SECOND_TOKENS + index] for index in range(_SECOND_TOKENS)]
    # From the end of the vocabulary, so that all tokens differ.
    other_first = [ordinary[-1 - index] for index in range(_FIRST_TOKENS)]
    other_second = [ordinary[-1 - index] for index in range(_SECOND_TOKENS)]
    for document, positions in ((first, (2,)), (second, (3,)), (other_first, (1, 4))):
        for position in positions:
            document[position] = config.mask_token_id
    return _ProbeDocuments(
        first=first,
        second=second,
        other_first=other_first,
        other_second=other_second,
    )


def _reason_against(
    run: Callable[[Ids, Ids], torch.Tensor],
    documents: _ProbeDocuments,
    expected: torch.Tensor,
) -> str | None:
    """Return the reason why packed documents cannot be computed this way.

    Args:
        run: Returns the logits of two packed documents.
        documents: The documents.
        expected: Logits of the first two, each computed alone.

    Returns:
        The reason, or None if they can.
    """
    first_tokens = len(documents.first)
    try:
        packed = run(documents.first, documents.second)
        beside_other = run(documents.first, documents.other_second)
        behind_other = run(documents.other_first, documents.second)
    except _MODEL_ERRORS as error:
        return f"it does not take the bounds of documents ({_first_line(error)})"
    unchanged = torch.cat([beside_other[:first_tokens], behind_other[first_tokens:]])
    if not torch.equal(unchanged, packed):
        return "packed documents influence each other"
    if not _is_close(packed, expected):
        return "packed documents have other logits than each alone"
    return None


def _logits_alone(model: PreTrainedModel, ids: Ids) -> torch.Tensor:
    """Return the logits of a document that has the sequence to itself."""
    ids_BS = torch.tensor([ids])
    logits: torch.Tensor = model(
        input_ids=ids_BS, attention_mask=torch.ones_like(ids_BS)
    ).logits
    return logits[0]


def _packed_logits(
    model: PreTrainedModel,
    kind: AttentionKind,
    packing: Packing,
    first: Ids,
    second: Ids,
) -> torch.Tensor:
    """Return the logits of two packed documents, through a sparse head."""
    tokens = len(first) + len(second)
    padding = [model.config.pad_token_id] * 2
    positions = torch.arange(tokens, dtype=torch.int32)
    batch = MicroBatch(
        ids_BS=torch.tensor([[*first, *second, *padding]]),
        starts_N=positions[[0, len(first)]],
        tokens_N=torch.tensor([len(first), len(second)]).int(),
        predicted_P=positions,
        targets_P=positions,
        non_padding_tokens=tokens,
        predicted_tokens=tokens,
        most_predicted_in_sequence=tokens,
        padded_sequences=1,
    )
    inputs = encoder_inputs(
        batch,
        kind,
        packing,
        model,
        dtype=torch.float32,
        window_tokens=window_tokens(model.config),
    )
    with head_inputs(model, positions.long()):
        logits: torch.Tensor = model(**inputs.arguments).logits
    return logits[0]


def _attend_plainly(
    query_THE: torch.Tensor,
    key_THE: torch.Tensor,
    value_THE: torch.Tensor,
    *,
    query_edges: torch.Tensor,
    window_tokens: int | None,
    scale: float | None,
    **_: object,
) -> torch.Tensor:
    """Compute ``attend_documents`` under a mask, on a CPU."""
    position_T = torch.arange(len(query_THE))
    document_T = torch.searchsorted(query_edges.long(), position_T, right=True)
    reach = len(query_THE) if window_tokens is None else window_tokens
    is_same_document_TT = document_T[:, None] == document_T
    is_near_TT = (position_T[:, None] - position_T).abs() <= reach
    query_HTE, key_HTE, value_HTE = (
        tensor.transpose(0, 1) for tensor in (query_THE, key_THE, value_THE)
    )
    return functional.scaled_dot_product_attention(
        query_HTE, key_HTE, value_HTE, is_same_document_TT & is_near_TT, scale=scale
    ).transpose(0, 1)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:100]
