"""Save the trained model in the form that transformers loads: safetensors, config, tokenizer. No pickle."""

import os
import secrets
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from trainer.dataset import TOKENIZER_NAME, SpecialIds


def export_model(
    model: PreTrainedModel, *, dataset_dir: Path, special_ids: SpecialIds, seq_length_tokens: int, directory: Path
) -> None:
    """Write the model and its tokenizer; the directory appears whole or not at all."""
    partial = directory.with_name(f".{directory.name}.{secrets.token_hex(4)}.partial")
    partial.mkdir(mode=0o700, parents=True)
    model.save_pretrained(partial)
    _tokenizer(dataset_dir, special_ids, seq_length_tokens).save_pretrained(str(partial))
    for path in partial.iterdir():
        _sync(path)
    partial.rename(directory)
    _sync(directory.parent)


def _tokenizer(dataset_dir: Path, special_ids: SpecialIds, seq_length_tokens: int) -> PreTrainedTokenizerFast:
    """The dataset's tokenizer, framing texts as the trainer framed its rows."""
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


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
