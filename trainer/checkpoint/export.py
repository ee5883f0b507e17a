"""Export of a trained model and its tokenizer in transformers' format."""

import secrets
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
)
from transformers import PreTrainedTokenizerFast

from trainer.formats.errors import BadConfig
from trainer.formats.files import sync
from trainer.formats.manifest import TOKENIZER_NAME, SpecialIds
from trainer.model.masked_lm import MaskedLM


def export_model(
    module: MaskedLM,
    *,
    dataset_dir: Path,
    special_ids: SpecialIds,
    seq_length_tokens: int,
    directory: Path,
    leads: bool,
) -> None:
    """Write the model and its tokenizer in transformers' format.

    The directory appears complete or not at all. All ranks must call it, as each may
    hold a shard of the weights.

    Args:
        module: Trained model, without the wrapper of its parallel strategy.
        dataset_dir: Dataset, which has the tokenizer.
        special_ids: Ids of the special tokens in the dataset.
        seq_length_tokens: Longest input that the tokenizer is to return.
        directory: Directory to write; an earlier export there is replaced.
        leads: True on rank 0, which writes.

    Raises:
        BadConfig: If the libraries cannot write, for example on a full disk.
    """
    weights = _gather_weights(module)
    if not leads:
        return
    # An export that was killed has left its partial directory.
    for leftover in directory.parent.glob(f".{directory.name}.*.partial"):
        shutil.rmtree(leftover, ignore_errors=True)
    partial = _hidden_sibling(directory, "partial")
    try:
        partial.mkdir(mode=0o700, parents=True)
        tokenizer = _load_tokenizer(dataset_dir, special_ids, seq_length_tokens)
        _write(module, weights, tokenizer, partial)
        _publish(partial, directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    sync(directory.parent)


def _gather_weights(module: MaskedLM) -> dict[str, torch.Tensor]:
    """Return all weights in rank 0's host memory, under transformers' names.

    All ranks must call it; other ranks get an empty dictionary.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(module.model, options=options)
    return {
        name: value for name, value in state.items() if isinstance(value, torch.Tensor)
    }


def _hidden_sibling(directory: Path, suffix: str) -> Path:
    """Return a new path beside a directory, hidden and with a suffix."""
    return directory.with_name(f".{directory.name}.{secrets.token_hex(4)}.{suffix}")


def _publish(partial: Path, directory: Path) -> None:
    """Rename a complete export to its directory, in place of an earlier one."""
    replaced = _hidden_sibling(directory, "replaced")
    if directory.exists():  # a finished run that was continued
        directory.rename(replaced)
    partial.rename(directory)
    shutil.rmtree(replaced, ignore_errors=True)


def _write(
    module: MaskedLM,
    weights: dict[str, torch.Tensor],
    tokenizer: PreTrainedTokenizerFast,
    partial: Path,
) -> None:
    """Write model and tokenizer into a directory, and sync its files.

    Raises:
        BadConfig: If the libraries cannot write.
    """
    try:
        module.model.save_pretrained(partial, state_dict=weights)
        tokenizer.save_pretrained(str(partial))
    except Exception as error:
        # For errors of the file system, safetensors raises its own exception and
        # tokenizers a bare Exception; all others are bugs.
        if not isinstance(error, SafetensorError) and type(error) is not Exception:
            raise
        raise BadConfig(
            f"cannot write the model to {partial.parent}: {error}",
            next_step=(
                "Free disk space and run the same command again: it only exports."
            ),
        ) from error
    for path in partial.iterdir():
        sync(path)
    sync(partial)


def _load_tokenizer(
    dataset_dir: Path, special_ids: SpecialIds, seq_length_tokens: int
) -> PreTrainedTokenizerFast:
    """Return the dataset's tokenizer, which adds special tokens as training does."""
    tokenizer = Tokenizer.from_file(str(dataset_dir / TOKENIZER_NAME))
    cls_token = tokenizer.id_to_token(special_ids.cls)
    sep_token = tokenizer.id_to_token(special_ids.sep)
    tokenizer.post_processor = TemplateProcessing(
        single=f"{cls_token} $A {sep_token}",
        special_tokens=[(cls_token, special_ids.cls), (sep_token, special_ids.sep)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=seq_length_tokens,
        pad_token=tokenizer.id_to_token(special_ids.pad),
        unk_token=tokenizer.id_to_token(special_ids.unk),
        cls_token=cls_token,
        sep_token=sep_token,
        mask_token=tokenizer.id_to_token(special_ids.mask),
    )
