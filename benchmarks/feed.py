"""``python -m benchmarks.feed``: the rate at which one process makes micro-batches.

They are masked-LM micro-batches. References, from PyPI, in the same process and the
same minute:

* plain: a ``datasets`` table of ids and attention masks padded to the full sequence,
  shuffled, through torch's loader and ``DataCollatorForLanguageModeling`` of
  transformers, which is how the recipes of that library feed an encoder;
* by hand: the same tuned: ids only, numpy format, and the collator's own mask function
  called directly on the batch.

Sequences of 512 in batches of 64, ``num_workers=0``. For samples/s, every sample fills
a sequence, so all do the same work; for non-padding tokens/s, samples have lengths of
real functions, which the plain way pads and ours packs. Repeats are interleaved;
figures are medians.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from autotune.base.tables import text_table
from autotune.base.units import format_count, format_share
from benchmarks.bars import Bar, finish, measuring, parser, run
from testbed.corpora import (
    SPECIAL_TOKENS,
    VOCAB_SIZE,
    Int64,
    real_lengths,
    write_corpus,
)
from trainer.data.batch_plan import SPECIAL_TOKENS_PER_SAMPLE, BatchPlan, make_plan
from trainer.data.dataset import TokenDataset
from trainer.data.loader import make_loader, micro_batch_plans
from trainer.data.micro_batch_source import MicroBatchSource
from trainer.data.packing import pack_sequences
from trainer.formats.train_config import ModelSettings, TrainConfig

ROWS, ROW_TOKENS = 64, 512
SAMPLES = 20_000
REPEATS = 7
WINDOW_S = 1.0

PLAIN_BAR, BY_HAND_BAR, PACKED_BAR, EFFICIENCY_BAR = 40.0, 10.0, 40.0, 0.995

Batches = Iterator[tuple[int, int]]
"""Endless: samples and non-padding tokens of one batch after another."""


@measuring
def main(arguments: Sequence[str] | None) -> int:
    """Measure, print and return the exit code."""
    options_of = parser("feed", "Time the feed.")
    options_of.add_argument(
        "--samples", type=int, default=SAMPLES, help="samples of each dataset"
    )
    options_of.add_argument(
        "--repeats",
        type=int,
        default=REPEATS,
        help="measuring windows of each contender",
    )
    options_of.add_argument(
        "--window-s", type=float, default=WINDOW_S, help="length of a window"
    )
    options = options_of.parse_args(arguments)
    import datasets  # noqa: F401 - the reference: without it there is nothing to measure against

    with tempfile.TemporaryDirectory(prefix="feed-") as place:
        rates = measure(Path(place), options.samples, options.repeats, options.window_s)
    efficiency = packing_efficiency(options.samples)
    bars = make_bars(rates, efficiency["all"])
    return finish(
        options.json,
        bars,
        {"rates": rates, "packing_efficiency": efficiency},
        _table(rates, efficiency),
    )


def measure(
    place: Path, samples: int, repeats: int, window_s: float
) -> dict[str, dict[str, list[float]]]:
    """Return samples/s and non-padding tokens/s of every contender, by name.

    Windows of the contenders are interleaved.
    """
    full = np.full(samples, ROW_TOKENS - SPECIAL_TOKENS_PER_SAMPLE)
    real = real_lengths(samples, seed=0)
    contenders: dict[str, Batches] = {}
    for name, lengths in (("full", full), ("real", real)):
        corpus = write_corpus(place / name, lengths)
        table = _padded_table(
            TokenDataset.open(corpus), lengths, place / f"{name}-arrow"
        )
        contenders[f"plain, {name} rows"] = _plain(table, place)
        contenders[f"by hand, {name} rows"] = _by_hand(table, place)
        contenders[f"padded, {name} rows"] = _ours(corpus, "padded")
        contenders[f"packed, {name} rows"] = _ours(corpus, "packed")
    rates: dict[str, dict[str, list[float]]] = {
        name: {"samples_per_s": [], "tokens_per_s": []} for name in contenders
    }
    for repeat in range(repeats + 1):
        for name, batches in contenders.items():
            samples_per_s, tokens_per_s = _window(batches, window_s)
            if repeat:  # the first warms caches
                rates[name]["samples_per_s"].append(samples_per_s)
                rates[name]["tokens_per_s"].append(tokens_per_s)
        sys.stderr.write(f"window {repeat} of {repeats}\n")
    return rates


def make_bars(rates: dict[str, dict[str, list[float]]], efficiency: float) -> list[Bar]:
    """Return the bars of the input pipeline: ratios of medians."""

    def ratio(ours: str, reference: str, what: str) -> float:
        return statistics.median(rates[ours][what]) / statistics.median(
            rates[reference][what]
        )

    plain = ratio("padded, full rows", "plain, full rows", "samples_per_s")
    by_hand = ratio("padded, full rows", "by hand, full rows", "samples_per_s")
    packed = ratio("packed, real rows", "plain, real rows", "tokens_per_s")
    return [
        Bar(
            name="feed_against_plain_ratio",
            figure=plain,
            unit="ratio",
            bar=PLAIN_BAR,
            direction=">=",
        ),
        Bar(
            name="feed_against_by_hand_ratio",
            figure=by_hand,
            unit="ratio",
            bar=BY_HAND_BAR,
            direction=">=",
        ),
        Bar(
            name="feed_packed_real_tokens_ratio",
            figure=packed,
            unit="ratio",
            bar=PACKED_BAR,
            direction=">=",
        ),
        Bar(
            name="feed_packing_efficiency_share",
            figure=efficiency,
            unit="share",
            bar=EFFICIENCY_BAR,
            direction=">=",
        ),
    ]


def packing_efficiency(samples: int) -> dict[str, float]:
    """Return how full sequences of real lengths are, in blocks as they are packed."""
    lengths = np.minimum(
        real_lengths(samples, seed=1) + SPECIAL_TOKENS_PER_SAMPLE, ROW_TOKENS
    )
    plan = _plan(
        TrainConfig(model=_NO_MODEL, seq_length_tokens=ROW_TOKENS, layout="packed"),
        samples,
    )
    blocks = [
        lengths[first : first + plan.block_samples]
        for first in range(0, samples, plan.block_samples)
    ]
    blocks = [block for block in blocks if len(block) == plan.block_samples] or blocks
    rows = sum(int(pack_sequences(block, ROW_TOKENS).max()) + 1 for block in blocks)
    tokens = sum(int(block.sum()) for block in blocks)
    full = sum(int((block == ROW_TOKENS).sum()) for block in blocks)
    return {
        "all": tokens / (rows * ROW_TOKENS),
        "without_full_samples": (
            (tokens - full * ROW_TOKENS) / ((rows - full) * ROW_TOKENS)
        ),
        "padded": tokens / (sum(len(block) for block in blocks) * ROW_TOKENS),
    }


_NO_MODEL = ModelSettings(name="none", config={"model_type": "bert"})


def _plan(config: TrainConfig, samples: int) -> BatchPlan:
    return make_plan(config, samples, world_size=1)


def _ours(corpus: Path, layout: Any) -> Batches:
    config = TrainConfig(
        model=_NO_MODEL,
        seq_length_tokens=ROW_TOKENS,
        micro_batch_size=ROWS,
        global_batch_size=ROWS,
        layout=layout,
    )
    dataset = TokenDataset.open(corpus)
    plan = _plan(config, len(dataset))
    for batch in make_loader(
        MicroBatchSource(dataset, config, plan),
        config,
        micro_batch_plans(dataset, config, plan, 0),
    ):
        yield len(batch.starts_N), batch.non_padding_tokens


def _padded_table(dataset: TokenDataset, lengths: Int64, place: Path) -> Any:
    """Return ids and attention masks of sequences padded to their full width, on disk.

    A tokenizer with padding writes the same.
    """
    import datasets

    def rows() -> Iterator[dict[str, Any]]:
        for sample in range(len(lengths)):
            body = dataset.read(sample, ROW_TOKENS - SPECIAL_TOKENS_PER_SAMPLE).tolist()
            ids = [2, *body, 3]
            padding = [0] * (ROW_TOKENS - len(ids))
            yield {
                "input_ids": ids + padding,
                "attention_mask": [1] * len(ids) + padding,
            }

    features = datasets.Features(
        {
            "input_ids": datasets.List(datasets.Value("int32")),
            "attention_mask": datasets.List(datasets.Value("int8")),
        }
    )
    datasets.disable_progress_bars()
    table = datasets.Dataset.from_generator(
        rows, features=features, cache_dir=str(place)
    )
    table.save_to_disk(str(place / "saved"))
    return datasets.load_from_disk(str(place / "saved"))


def _collator(place: Path) -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

    words = [
        *SPECIAL_TOKENS,
        *(f"w{number}" for number in range(len(SPECIAL_TOKENS), VOCAB_SIZE)),
    ]
    inner = Tokenizer(
        WordLevel(
            {word: number for number, word in enumerate(words)}, unk_token="[UNK]"
        )
    )
    inner.add_special_tokens(list(SPECIAL_TOKENS))
    inner.save(str(place / "tokenizer.json"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(place / "tokenizer.json"),
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )
    return DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)


def _plain(table: Any, place: Path) -> Batches:
    import torch

    loader = torch.utils.data.DataLoader(
        table, batch_size=ROWS, shuffle=True, collate_fn=_collator(place)
    )
    while True:
        for batch in loader:
            yield len(batch["input_ids"]), int(batch["attention_mask"].sum())


def _by_hand(table: Any, place: Path) -> Batches:
    import torch

    collator = _collator(place)
    ids_only = table.select_columns(["input_ids"]).with_format("numpy")

    def collate(rows: list[Any]) -> Any:
        ids = torch.from_numpy(np.stack([row["input_ids"] for row in rows])).long()
        real = ids != 0
        return *collator.torch_mask_tokens(ids), real

    loader = torch.utils.data.DataLoader(
        ids_only, batch_size=ROWS, shuffle=True, collate_fn=collate
    )
    while True:
        for ids, _, real in loader:
            yield len(ids), int(real.sum())


def _window(batches: Batches, window_s: float) -> tuple[float, float]:
    """Return samples/s and non-padding tokens/s of a window.

    It has at least one batch and about the window's length.
    """
    samples = tokens = 0
    started_s = time.perf_counter()
    while True:
        for batch in islice(batches, 4):
            samples += batch[0]
            tokens += batch[1]
        elapsed_s = time.perf_counter() - started_s
        if elapsed_s >= window_s:
            return samples / elapsed_s, tokens / elapsed_s


def _table(
    rates: dict[str, dict[str, list[float]]], efficiency: dict[str, float]
) -> str:
    rows = []
    for name, measured in rates.items():
        reference = rates[f"plain, {name.rpartition(', ')[2]}"]
        samples, tokens = (
            statistics.median(measured[what])
            for what in ("samples_per_s", "tokens_per_s")
        )
        against = statistics.median(reference["tokens_per_s"])
        spread = (
            max(measured["tokens_per_s"]) - min(measured["tokens_per_s"])
        ) / tokens
        rows.append(
            [
                name,
                format_count(round(samples)),
                format_count(round(tokens)),
                f"{tokens / against:.1f}",
                format_share(spread),
            ]
        )
    table = text_table(
        ["", "samples/s", "non-padding tokens/s", "tokens/s of plain", "spread"], rows
    )
    return (
        f"{table}\npacking efficiency: {efficiency['all']:.4f}; without samples that"
        f" fill a row alone: {efficiency['without_full_samples']:.4f}; padding alone"
        f" would fill {efficiency['padded']:.4f}"
    )


if __name__ == "__main__":
    run(main)
