"""Small datasets, written by hand from the documented format alone."""

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from trainer.formats.manifest import read_manifest

PROFILE = Path(__file__).parents[1] / "profiles/bert-mini-cpu.toml"

Samples = Sequence[Sequence[int]]
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def write_dataset(
    directory: Path,
    samples: Samples,
    vocab_size: int = 500,
    shards: int = 1,
    validation: Samples = (),
) -> Path:
    """Write a dataset by hand, from the documented format alone."""
    directory.mkdir(parents=True)
    words = [*SPECIAL, *(f"w{number}" for number in range(len(SPECIAL), vocab_size))]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "normalizer": None,
        "post_processor": None,
        "decoder": None,
        "added_tokens": [
            {
                "id": i,
                "content": w,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for i, w in enumerate(SPECIAL)
        ],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {
            "type": "WordLevel",
            "vocab": {w: i for i, w in enumerate(words)},
            "unk_token": "[UNK]",
        },
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    manifest = {
        "schema_version": 2,
        "dtype": "uint16",
        "vocab_size": -(-vocab_size // 64) * 64,
        "used_vocab_size": vocab_size,
        "special_ids": {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4},
        "tokenizer_sha256": _sha256(directory / "tokenizer.json"),
        "train": _write_split(directory, "train", samples, shards),
        "validation": _write_split(
            directory, "validation", validation, 1 if validation else 0
        ),
        "source": {
            "kinds": ["test"],
            "files": 1,
            "rejected": 0,
            "duplicate_samples": 0,
            "empty_samples": 0,
            "truncated_samples": 0,
            "split_samples": 0,
            "raw_bytes": 1000,
            "token_bytes": 500,
            "unknown_tokens": 0,
        },
    }
    (directory / "manifest.json").write_text(json.dumps(manifest))
    return directory


def _write_split(
    directory: Path, name: str, samples: Samples, shards: int
) -> dict[str, object]:
    entries = []
    for number, part in enumerate(
        np.array_split(np.arange(len(samples)), shards) if shards else []
    ):
        chosen = [samples[i] for i in part]
        tokens = np.array(
            [token for sample in chosen for token in sample], dtype=np.uint16
        )
        offsets = np.cumsum([0, *(len(sample) for sample in chosen)]).astype(np.uint64)
        names = (f"{name}-tokens-{number:05}.npy", f"{name}-offsets-{number:05}.npy")
        np.save(directory / names[0], tokens)
        np.save(directory / names[1], offsets)
        entries.append(
            {
                "tokens_file": names[0],
                "offsets_file": names[1],
                "samples": len(chosen),
                "tokens": len(tokens),
                "tokens_sha256": _sha256(directory / names[0]),
                "offsets_sha256": _sha256(directory / names[1]),
            }
        )
    edges = [0, 32, 64, 128]
    bins = [
        int(np.searchsorted(edges, len(sample), side="right")) - 1 for sample in samples
    ]
    counts = [bins.count(index) for index in range(len(edges))]
    return {"shards": entries, "length_histogram": {"edges": edges, "counts": counts}}


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_profile_for(dataset: Path, path: Path) -> Path:
    """Write the shipped profile as if it had been tuned on this dataset."""
    its_hash = f'dataset_hash = "{read_manifest(dataset).dataset_hash}"'
    tuned = PROFILE.read_text()
    path.write_text(
        re.sub(r'^dataset_hash = "\w+"', its_hash, tuned, flags=re.MULTILINE)
    )
    return path
