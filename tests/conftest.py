"""What all tests share: a skip that CI does not accept, and small real datasets."""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import hypothesis
import numpy as np
import pytest

from autotune.errors import MachineLacks
from tests.browser import chromium

# What no set-up can give: a GPU where there is none (or its absence where there is
# one), and refusals to root.
ACCEPTED_SKIPS = (
    "needs an NVIDIA GPU",
    "this machine has the driver's library",
    "root may",
)

# Two files at a time end together where the longest come first.
LONGEST = (
    "test_quickstart.py",
    "test_typed.py",
    "test_train_faults.py",
    "test_data_faults.py",
    "test_chain.py",
    "test_gpu_check.py",
    "cuda/test_commands.py",
    "cuda/test_training.py",
)

# Machines are shared: what an example computes is tested, and how long it takes is not.
hypothesis.settings.register_profile("any machine", deadline=None, max_examples=50)
# Make soak.
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=400)
hypothesis.settings.load_profile("any machine")


TORCHAO = Path(sys.prefix) / "fp8"
"""Folder of torchao, which is not installed otherwise: transformers would import it in
every process."""


@pytest.fixture
def torchao(monkeypatch):
    monkeypatch.syspath_prepend(TORCHAO)


def pytest_configure(config):
    """Tests that run beside others get a core each: threads of two processes that spin
    for one core cost most of it."""
    worker = getattr(config, "workerinput", None)
    if worker is not None:
        cpus = sorted(os.sched_getaffinity(0))
        number = int(worker["workerid"].removeprefix("gw"))
        share = len(cpus) // worker["workercount"]
        os.sched_setaffinity(
            0, cpus[number * share : (number + 1) * share] or [cpus[number % len(cpus)]]
        )


def pytest_collection_modifyitems(items):
    items.sort(
        key=lambda item: [item.path.match(name) for name in LONGEST], reverse=True
    )


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """In CI a skip is a failure: what is absent there was forgotten by whoever set the
    machine up."""
    report = (yield).get_result()
    if (
        os.environ.get("CI") == "true"
        and report.skipped
        and not hasattr(report, "wasxfail")
    ):
        reason = str(
            report.longrepr[2]
            if isinstance(report.longrepr, tuple)
            else report.longrepr
        )
        if not any(accepted in reason for accepted in ACCEPTED_SKIPS):
            report.outcome = "failed"
            report.longrepr = f"skipped, which CI does not accept: {reason}"


@pytest.fixture(scope="session")
def browser() -> None:
    try:
        chromium()
    except MachineLacks as error:
        pytest.skip(error.message)


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


@pytest.fixture
def make_dataset(tmp_path) -> Callable[..., Path]:
    return partial(write_dataset, tmp_path / "data")


@pytest.fixture(scope="session")
def patterned_dataset(tmp_path_factory) -> Path:
    """400 samples in which each word follows from the one before it, so that a model
    can learn something at once."""
    rng = np.random.default_rng(0)
    starts = [(int(rng.integers(5, 60)), int(rng.integers(8, 40))) for _ in range(400)]
    samples = [
        [5 + (start + step) % 60 for step in range(length)] for start, length in starts
    ]
    return write_dataset(
        tmp_path_factory.mktemp("patterned") / "data", samples, vocab_size=128
    )
