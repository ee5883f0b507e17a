"""A directory in which the commands of a page are typed."""

import json
from pathlib import Path

import pytest

TINY = {
    "model_type": "bert",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 128,
}


@pytest.fixture
def directory(tmp_path) -> Path:
    """Return a directory with a small model, as its config.json, under two names."""
    for name in ("tiny", "my-encoder"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(TINY))
    return tmp_path
