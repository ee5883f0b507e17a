"""Proof that documents can share a sequence: a small copy of an encoder computes two of them packed, and each alone.

Shapes: S positions of a sequence, T = S, H heads, E dimensions of a head, K positions
given to the head.
"""

import copy
import functools
import json
from collections.abc import Callable
from dataclasses import replace
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

from trainer.data.loader import MicroBatch
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
_NAME = "documents_of_probe"
_TOKENS = 7, 9
"""Tokens of the two documents: more than twice the window of ``_small``."""
_VOCAB_SIZE = 64
_MOST_PARAMETERS = 40_000_000
"""Limit of the small copy: some architectures have large parts besides the layers."""
_TOLERANCE = 1e-4
"""Largest difference of fp32 logits, as a share of the largest logit, from sums in
another order."""
_RAISED = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Errors of an architecture that gets arguments it does not know."""


def verify_packing(config: PretrainedConfig) -> Packing | str:
    """Return how an architecture takes packed sequences, or the reason why it cannot.

    The logits of packed documents must equal those of each document alone, with its
    padding mask as transformers builds it, and must not change by a single bit if all
    tokens of the other document do.
    """
    return cast("Packing | str", _found(_packing, config))


def verify_working_copies(config: PretrainedConfig) -> str | None:
    """Return the reason why an architecture cannot compute with working copies of its weights; None if it can."""
    return cast("str | None", _found(_against_copies, config))


def _found(
    prove: Callable[[PreTrainedModel], object], config: PretrainedConfig
) -> object:
    # BigBird's choice by length.
    if getattr(config, "attention_type", "original_full") != "original_full":
        return "its attention is sparse in sequences longer than a probe"
    why = ""
    for narrow in (True, False):  # some architectures have sizes that depend on others
        try:
            return _proved(
                prove, _small(config, narrow=narrow).to_json_string(use_diff=False)
            )
        except (*_RAISED, BadConfig) as error:
            why = f"a small copy of it cannot be computed ({_line(error)})"
    return why


def _small(config: PretrainedConfig, *, narrow: bool) -> PretrainedConfig:
    """Return the config with few layers, of each kind.

    ``narrow`` also with few heads of the same size.
    """
    small = copy.deepcopy(config)
    kinds = getattr(config, "layer_types", None)
    small.num_hidden_layers = min(config.num_hidden_layers, 2)
    if kinds:
        small.layer_types = (list(dict.fromkeys(kinds)) * 2)[: max(2, len(set(kinds)))]
        small.num_hidden_layers = len(small.layer_types)
    heads = min(config.num_attention_heads, 2)
    keys = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    changes = {
        "hidden_size": config.hidden_size // config.num_attention_heads * heads,
        "num_attention_heads": heads,
        "num_key_value_heads": 1 if keys < config.num_attention_heads else heads,
        "intermediate_size": 64,
        "hidden_dim": 64,
    }
    if narrow:
        for key in changes.keys() & set(dir(config)):
            setattr(small, key, changes[key])
    if window_tokens(config) is not None:
        small.sliding_window = 2
    ids = [
        value
        for key, value in vars(config).items()
        if key.endswith("_token_id") and isinstance(value, int)
    ]
    small.vocab_size = min(config.vocab_size, _VOCAB_SIZE + max(ids))
    return small


@functools.cache
def _proved(prove: Callable[[PreTrainedModel], object], small: str) -> object:
    values = json.loads(small)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with _disable_current_modes():
        size = sum(
            parameter.numel()
            for parameter in fresh_model(config, torch.device("meta")).parameters()
        )
    if size > _MOST_PARAMETERS:
        raise ValueError(f"even with few layers it has {size:,} parameters")
    # Outside of all modes, as a trace would record the probe, and with the generator
    # left as it was.
    with (
        torch._C.DisableTorchFunction(),
        _disable_current_modes(),
        torch.random.fork_rng([]),
    ):
        model = fresh_model(config, torch.device("cpu")).eval()
        for values in (one.data for one in model.parameters() if one.requires_grad):
            # Away from zeros, ones and small values, which would hide an influence.
            if values.dim() > 1:
                values.normal_(std=2 * values.shape[-1] ** -0.5)
            else:
                values.add_(torch.randn_like(values), alpha=0.2)
        return prove(model)


@torch.no_grad()
def _packing(model: PreTrainedModel) -> Packing | str:
    AttentionInterface.register(
        _NAME, functools.partial(attend_within_documents, attend=_attend_plainly)
    )
    documents = _documents(model.config)
    together = torch.cat([_alone(model, ids) for ids in documents[:2]])
    why: list[str] = []
    for embeds, first_position in product(
        (False, True), (0, model.config.pad_token_id + 1)
    ):
        packing = Packing(first_position=first_position, needs_embeddings=embeds)
        found = _against(
            functools.partial(_logits, model, "sdpa", packing), documents, together
        )
        if found is None:
            model.config._attn_implementation = _NAME
            varlen = _against(
                functools.partial(_logits, model, "varlen", packing),
                documents,
                together,
            )
            return replace(packing, no_varlen_reason=varlen)
        why.append(found)
    return why[0]


def _against_copies(model: PreTrainedModel) -> str | None:
    # In fp32, logits and gradients must be those without copies; in bf16, autocast must
    # accept them.
    wide, narrow = copy.deepcopy(model), copy.deepcopy(model)
    WorkingCopies(wide, dtype=torch.float32)
    for one, other in zip(_learned(model), _learned(wide), strict=True):
        if not (one - other).abs().max() <= _TOLERANCE * one.abs().max():
            return "its linear layers are called in another order, or with other inputs"
    WorkingCopies(narrow)
    with torch.autocast("cpu", torch.bfloat16):
        _learned(narrow)
    return None


def _learned(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of a document, and the gradient of their squares with respect to all parameters."""
    logits = _alone(model, _documents(model.config)[0])
    trained = [one for one in model.parameters() if one.requires_grad]
    gradients = torch.autograd.grad(
        logits.float().square().sum(), trained, materialize_grads=True
    )
    return logits, torch.cat([one.flatten() for one in gradients])


def _documents(config: PretrainedConfig) -> tuple[Ids, Ids, Ids, Ids]:
    """Return two documents, and another in place of each, with mask tokens at other positions."""
    special = {
        value for key, value in vars(config).items() if key.endswith("_token_id")
    }
    plain = [number for number in range(config.vocab_size) if number not in special]
    first, second = (
        [plain[number + tokens] for number in range(tokens)] for tokens in _TOKENS
    )
    other_first, other_second = (
        [plain[-1 - number] for number in range(tokens)] for tokens in _TOKENS
    )
    first[2] = second[3] = other_first[1] = other_first[4] = config.mask_token_id
    return first, second, other_first, other_second


def _against(
    run: Callable[[Ids, Ids], torch.Tensor],
    documents: tuple[Ids, Ids, Ids, Ids],
    together: torch.Tensor,
) -> str | None:
    """Return the reason why packed documents cannot be computed this way.

    None if there is none.
    """
    first, second, other_first, other_second = documents
    try:
        packed = run(first, second)
        unchanged = (
            run(first, other_second)[: len(first)],
            run(other_first, second)[len(first) :],
        )
    except _RAISED as error:
        return f"it does not take the bounds of documents ({_line(error)})"
    if not torch.equal(torch.cat(unchanged), packed):
        return "packed documents influence each other"
    if not (packed - together).abs().max() <= _TOLERANCE * together.abs().max():
        return "packed documents have other logits than each alone"
    return None


def _alone(model: PreTrainedModel, ids: Ids) -> torch.Tensor:
    ids_BS = torch.tensor([ids])
    logits: torch.Tensor = model(
        input_ids=ids_BS, attention_mask=torch.ones_like(ids_BS)
    ).logits
    return logits[0]


def _logits(
    model: PreTrainedModel,
    kind: AttentionKind,
    packing: Packing,
    first: Ids,
    second: Ids,
) -> torch.Tensor:
    """Return the logits of all tokens of two packed documents, through a sparse head."""
    tokens = len(first) + len(second)
    ids = torch.tensor([[*first, *second, *[model.config.pad_token_id] * 2]])
    places = torch.arange(tokens, dtype=torch.int32)
    batch = MicroBatch(
        ids_BS=ids,
        starts_N=places[[0, len(first)]],
        tokens_N=torch.tensor([len(first), len(second)]).int(),
        predicted_P=places,
        targets_P=places,
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
    with head_inputs(model, places.long()):
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
    place_T = torch.arange(len(query_THE))
    document_T = torch.searchsorted(query_edges.long(), place_T, right=True)
    reach = len(query_THE) if window_tokens is None else window_tokens
    allowed_TT = (document_T[:, None] == document_T) & (
        (place_T[:, None] - place_T).abs() <= reach
    )
    query, key, value = (
        tensor.transpose(0, 1) for tensor in (query_THE, key_THE, value_THE)
    )
    return functional.scaled_dot_product_attention(
        query, key, value, allowed_TT, scale=scale
    ).transpose(0, 1)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:100]
