"""Small copies of encoders, which show what an architecture can compute.

A small copy has few layers with random weights, on a CPU. It computes short documents.
"""

import copy
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from trainer.formats.errors import BadConfig
from trainer.model.encoder import fresh_model
from trainer.model.encoder_config import window_tokens

Ids = list[int]
"""Token ids of a document."""
_Result = TypeVar("_Result")
_SMALL_WINDOW_TOKENS = 2
"""Reach of a small copy's sliding windows: less than half of a document, so that they
have an effect."""
_FIRST_TOKENS = 7
"""Length of the first document."""
_SECOND_TOKENS = 9
"""Length of the second document."""
_VOCAB_SIZE = 64
"""Difference between the size of a small copy's vocabulary and its largest special
id."""
MODEL_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Errors of an architecture that gets arguments or sizes that it does not support."""
_MAX_PARAMETERS = 40_000_000
"""Limit of the small copy: some architectures have large parts besides the layers."""
_TOLERANCE = 1e-4
"""Largest difference of fp32 results, as a share of the largest result, from sums in
another order."""


class NoSmallCopy(Exception):
    """No small copy of an architecture can be computed; the message is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeDocuments:
    """Two documents, and a replacement of each."""

    first: Ids
    second: Ids
    other_first: Ids
    """Document of the length of ``first`` that differs from it in every token."""
    other_second: Ids
    """Document of the length of ``second`` that differs from it in every token."""


def check_small_copy(
    check: Callable[[PreTrainedModel], _Result], config: PretrainedConfig
) -> _Result:
    """Run a check on a small copy of a config's model and return its result.

    Args:
        check: Function of the small copy. Its result is cached by the copy's config, so
            it must depend on that only.
        config: Config of the model.

    Raises:
        NoSmallCopy: If no small copy can be computed.
    """
    # BigBird chooses its attention by the length of sequences.
    if getattr(config, "attention_type", "original_full") != "original_full":
        raise NoSmallCopy("its attention is sparse in sequences longer than a probe")
    reason = ""
    # Some architectures have sizes that depend on others, and fail if only some shrink.
    for narrow in (True, False):
        try:
            small = _small_config(config, narrow=narrow)
            result = build_and_check(check, small.to_json_string(use_diff=False))
            return cast("_Result", result)
        except (*MODEL_ERRORS, BadConfig) as error:
            reason = f"a small copy of it cannot be computed ({summarise(error)})"
    raise NoSmallCopy(reason)


def _small_config(config: PretrainedConfig, *, narrow: bool) -> PretrainedConfig:
    """Return the config with few layers and ids, and a small window.

    Args:
        config: Config of the model.
        narrow: True to leave few heads too, of the same size, and a narrow MLP.
    """
    small = copy.deepcopy(config)
    _keep_few_layers(small)
    if narrow:
        _keep_few_heads(small)
    if window_tokens(small) is not None:
        small.sliding_window = _SMALL_WINDOW_TOKENS
    special_ids = [
        value
        for key, value in vars(config).items()
        if key.endswith("_token_id") and isinstance(value, int)
    ]
    small.vocab_size = min(config.vocab_size, _VOCAB_SIZE + max(special_ids))
    return small


def _keep_few_layers(config: PretrainedConfig) -> None:
    """Leave one layer of each kind of attention, and two if there is only one kind."""
    kinds = getattr(config, "layer_types", None)
    if kinds:
        layer_types = list(dict.fromkeys(kinds))
        if len(layer_types) == 1:
            layer_types *= 2
        config.layer_types = layer_types
        config.num_hidden_layers = len(layer_types)
    else:
        config.num_hidden_layers = min(config.num_hidden_layers, 2)


def _keep_few_heads(config: PretrainedConfig) -> None:
    """Leave two heads of the same size, and a narrow MLP."""
    all_heads = config.num_attention_heads
    heads = min(all_heads, 2)
    key_heads = getattr(config, "num_key_value_heads", None)
    has_grouped_queries = bool(key_heads) and key_heads < all_heads
    # Architectures have different keys for the same size.
    sizes = {
        "hidden_size": config.hidden_size // all_heads * heads,
        "num_attention_heads": heads,
        "num_key_value_heads": 1 if has_grouped_queries else heads,
        "intermediate_size": 64,
        "hidden_dim": 64,
    }
    # Only keys of its own: ``hasattr`` is also true for those that it maps to others.
    keys_of_config = dir(config)
    for key, size in sizes.items():
        if key in keys_of_config:
            setattr(config, key, size)


@functools.cache
def build_and_check(
    check: Callable[[PreTrainedModel], object], config_json: str
) -> object:
    """Build a model with random weights, run a check on it and return the result.

    Args:
        check: The check.
        config_json: Config of the model, as JSON, which the cache can compare.

    Raises:
        ValueError: If the model has too many parameters.
    """
    values = json.loads(config_json)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    # Outside of all modes that are active, as a trace would record the probe. torch has
    # no public functions to leave them, of operations and of functions.
    with _disable_current_modes():
        on_meta = fresh_model(config, torch.device("meta"))
        parameters = sum(parameter.numel() for parameter in on_meta.parameters())
    if parameters > _MAX_PARAMETERS:
        raise ValueError(f"even with few layers it has {parameters:,} parameters")
    # The state of the generator is restored: the training draws the same numbers with
    # and without a probe.
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
    """Change a weight in place to values that hide no influence.

    Fresh weights are zeros, ones or small numbers.
    """
    if values.dim() > 1:
        values.normal_(std=2 * values.shape[-1] ** -0.5)
    else:
        values.add_(torch.randn_like(values), alpha=0.2)


def is_close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return True if values are equal but for sums in another order; False for NaN."""
    error = (actual - expected).abs().max()
    return bool(error <= _TOLERANCE * expected.abs().max())


def logits_alone(model: PreTrainedModel, ids: Ids) -> torch.Tensor:
    """Return the logits of a document that has the sequence to itself."""
    ids_BS = torch.tensor([ids])
    logits: torch.Tensor = model(
        input_ids=ids_BS, attention_mask=torch.ones_like(ids_BS)
    ).logits
    return logits[0]


def probe_documents(config: PretrainedConfig) -> ProbeDocuments:
    """Return documents of ordinary tokens, with mask tokens at different positions."""
    special_ids = {
        value for key, value in vars(config).items() if key.endswith("_token_id")
    }
    ordinary = [token for token in range(config.vocab_size) if token not in special_ids]
    # The two share some tokens, at other positions. They are indexed, not sliced, so
    # that a vocabulary that is too small raises an error.
    first = [ordinary[_FIRST_TOKENS + index] for index in range(_FIRST_TOKENS)]
    second = [ordinary[_SECOND_TOKENS + index] for index in range(_SECOND_TOKENS)]
    # From the end of the vocabulary, so that all tokens differ.
    other_first = [ordinary[-1 - index] for index in range(_FIRST_TOKENS)]
    other_second = [ordinary[-1 - index] for index in range(_SECOND_TOKENS)]
    first[2] = config.mask_token_id
    second[3] = config.mask_token_id
    # A different number of mask tokens, as ESM scales embeddings by their share.
    other_first[1] = config.mask_token_id
    other_first[4] = config.mask_token_id
    return ProbeDocuments(
        first=first,
        second=second,
        other_first=other_first,
        other_second=other_second,
    )


def summarise(error: Exception) -> str:
    """Return an error's class and the beginning of its message, for messages."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:100]
