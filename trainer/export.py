"""Save the trained model in the form that transformers loads: safetensors, config, tokenizer. No pickle."""

import secrets
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import PreTrainedTokenizerFast

from trainer.dataset import TOKENIZER_NAME, SpecialIds
from trainer.disk import sync
from trainer.errors import BadConfig
from trainer.objective import MaskedLM


def export_model(
    module: MaskedLM,
    *,
    dataset_dir: Path,
    special_ids: SpecialIds,
    seq_length_tokens: int,
    directory: Path,
    leads: bool,
) -> None:
    """Write the model and its tokenizer; the directory appears whole or not at all.

    All ranks take part, as each may hold a share of the weights; the one that leads writes. A disk that is full, or
    refuses otherwise, is a ``BadConfig``.
    """
    # On the host of rank 0, under transformers' names, wherever their parts lie.
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    found = get_model_state_dict(module.model, options=options)
    weights = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
    if not leads:
        return
    for left in directory.parent.glob(f".{directory.name}.*.partial"):  # by a start that was killed
        shutil.rmtree(left, ignore_errors=True)
    partial = directory.with_name(f".{directory.name}.{secrets.token_hex(4)}.partial")
    try:
        partial.mkdir(mode=0o700, parents=True)
        _write(module, weights, _tokenizer(dataset_dir, special_ids, seq_length_tokens), partial)
        before = directory.with_name(f".{directory.name}.{secrets.token_hex(4)}.replaced")
        if directory.exists():  # a run that was finished before, and has gone on
            directory.rename(before)
        partial.rename(directory)
        shutil.rmtree(before, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    sync(directory.parent)


def _write(
    module: MaskedLM, weights: dict[str, torch.Tensor], tokenizer: PreTrainedTokenizerFast, partial: Path
) -> None:
    try:
        module.model.save_pretrained(partial, state_dict=weights)
        tokenizer.save_pretrained(str(partial))
    except Exception as error:
        # Whatever the system refused these libraries, of which one raises nothing narrower.
        if not isinstance(error, SafetensorError) and type(error) is not Exception:
            raise
        raise BadConfig(
            f"cannot write the model into {partial.parent}: {error}",
            next_step="Free room there, and start again: it goes on from the last checkpoint, and only exports.",
        ) from error
    for path in partial.iterdir():
        sync(path)
    sync(partial)


def _tokenizer(dataset_dir: Path, special_ids: SpecialIds, seq_length_tokens: int) -> PreTrainedTokenizerFast:
    """Return the dataset's tokenizer, framing texts as the trainer framed its sequences."""
    tokenizer = Tokenizer.from_file(str(dataset_dir / TOKENIZER_NAME))
    names = {role: tokenizer.id_to_token(getattr(special_ids, role)) for role in ("pad", "unk", "cls", "sep", "mask")}
    tokenizer.post_processor = TemplateProcessing(
        single=f"{names['cls']} $A {names['sep']}",
        special_tokens=[(names["cls"], special_ids.cls), (names["sep"], special_ids.sep)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=seq_length_tokens,
        **{f"{role}_token": name for role, name in names.items()},
    )
