"""``python -m benchmarks.train``: our training step against two others, on a CPU.

They are the paper's and transformers' Trainer. The recipes that stand for these two in
``autotune baseline`` are compared with them as well.

Fixed: BERT of 4 layers, hidden 256, sequences of 512, micro-batches of 8, lengths of
real functions without duplicates, the same samples per optimizer step, the same
schedule and dropout (the paper drops no attention weights), fp32. Contenders interleave
their optimizer steps, each with its own loop, loader and logging; a figure is a ratio
of medians of non-padding tokens per second.

Packed ESM and EuroBERT, of the same size, are compared with their padded way: one
sample per sequence of 512 and a dense MLM head.
"""

import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from autotune.base.tables import text_table
from autotune.subjects.mlm.baselines.recipes import padded, untuned
from benchmarks.bars import Bar, Direction, bars_of, finish, measuring, parser, run
from testbed.corpora import real_lengths, write_learnable_corpus

LAYERS, HIDDEN, HEADS, INTERMEDIATE = 4, 256, 4, 1024
ROW_TOKENS, MICRO_BATCH_ROWS, SAMPLES_PER_STEP = 512, 8, 64
TRAIN_SAMPLES, VALIDATION_SAMPLES = 6000, 256
LEARNING_RATE, WARM_UP_STEPS = 1e-3, 5
BARS: dict[str, tuple[str, Direction, float]] = {
    "train_against_paper_ratio": ("ratio", ">=", 5.0),
    "train_against_hf_trainer_ratio": ("ratio", ">=", 4.5),
    "train_paper_recipe_ratio": ("ratio", ">=", 1.0),
    "train_hf_recipe_difference_share": ("share", "<=", 0.1),
    "train_loss_difference_share": ("share", "<=", 0.01),
    "train_step_overhead_share": ("share", "<=", 0.03),
}
_SIZES = {
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "intermediate_size": INTERMEDIATE,
}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SHAPES: dict[str, dict[str, Any]] = {
    "esm": _NO_DROPOUT | {"position_embedding_type": "rotary", "token_dropout": True},
    "eurobert": {"num_key_value_heads": 2},
}
FAMILY_BARS: dict[str, tuple[str, Direction, float]] = {
    f"train_{name}_against_padded_ratio": ("ratio", ">=", 3.0) for name in SHAPES
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Varied settings of a comparison."""

    dropout: float
    vocab_size: int
    turns: int
    """Optimizer steps of each contender."""
    learned: bool = False
    """Whether ours and transformers' train to the end of their schedule, to compare
    their losses."""

    @property
    def name(self) -> str:
        """As printed."""
        return f"V {self.vocab_size:,}, dropout {self.dropout:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Measurements of one setting."""

    tokens_per_s: Mapping[str, Sequence[float]]
    """Of each contender, per turn, the first left out."""
    ceiling: float
    """The ratio of operations per real token, the paper's over ours."""
    overhead: float | None
    """Part of our step outside forward, backward and optimizer; None if steps were only
    interleaved."""
    losses: Mapping[str, float]
    """On the same validation rows, after the same number of steps."""


@measuring
def main(arguments: Sequence[str] | None) -> int:
    """Measure, print, write, and return the exit code."""
    options_of = parser("train", "The step against its references.")
    options_of.add_argument(
        "--steps", type=int, default=30, help="optimizer steps of the runs that learn"
    )
    options_of.add_argument(
        "--turns",
        type=int,
        default=6,
        help="optimizer steps of each contender that are timed",
    )
    options_of.add_argument(
        "--families",
        action="store_true",
        help="only packed ESM and EuroBERT against padded ones",
    )
    options = options_of.parse_args(arguments)
    families = _families(options.turns)
    bars = make_family_bars(families)
    shown = [_families_table(families)]
    if options.families:
        return finish(options.json, bars, {"families": families}, shown[0])
    import accelerate  # noqa: F401 - transformers' Trainer asks for it

    settings = (
        Setting(dropout=0.0, vocab_size=22_016, turns=options.turns, learned=True),
        Setting(dropout=0.1, vocab_size=22_016, turns=max(2, options.turns // 2)),
        Setting(dropout=0.1, vocab_size=8_192, turns=max(2, options.turns // 2)),
    )
    results: dict[str, Found] = {}
    for setting in settings:
        with tempfile.TemporaryDirectory(prefix="train-") as place:
            results[setting.name] = measure(Path(place), setting, options.steps)
    bars += make_bars(results[settings[0].name])
    shown += [f"{name}\n{_table(result)}" for name, result in results.items()]
    content = {
        "settings": {name: _json(result) for name, result in results.items()},
        "families": families,
    }
    return finish(options.json, bars, content, "\n\n".join(shown))


def _families(turns: int) -> dict[str, dict[str, list[float]]]:
    """Interleave packed and padded sequences of each family.

    Returns:
        Their tokens/s.
    """
    from benchmarks.rivals import Ours

    rates: dict[str, dict[str, list[float]]] = {}
    for name, shape in SHAPES.items():
        with tempfile.TemporaryDirectory(prefix="train-") as place:
            setting = Setting(dropout=0.0, vocab_size=22_016, turns=turns)
            match = make_match(
                Path(place), setting, turns + 2, {"model_type": name} | _SIZES | shape
            )
            padded = {"layout": "padded", "mlm_head": "dense", "last_layer": "dense"}
            before = replace(match, config=match.config.model_copy(update=padded))
            contenders = {"packed": Ours(match), "padded": Ours(before)}
            rates[name] = _interleave(name, contenders, turns)
            for contender in contenders.values():
                contender.finish()
    return rates


def make_family_bars(
    families: Mapping[str, Mapping[str, Sequence[float]]],
) -> list[Bar]:
    """Compare packed with padded sequences."""
    figures = (
        statistics.median(family["packed"]) / statistics.median(family["padded"])
        for family in families.values()
    )
    return bars_of(FAMILY_BARS, dict(zip(FAMILY_BARS, figures, strict=True)))


def _families_table(families: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    rows = [
        [
            name,
            *(f"{statistics.median(family[way]):,.0f}" for way in ("packed", "padded")),
        ]
        for name, family in families.items()
    ]
    return text_table(["", "packed, tokens/s", "padded, tokens/s"], rows)


def _interleave(
    name: str, contenders: Mapping[str, Any], turns: int
) -> dict[str, list[float]]:
    """Return the non-padding tokens per second of each contender's steps.

    The first step is left out, as it warms caches.
    """
    rates: dict[str, list[float]] = {contender: [] for contender in contenders}
    for turn in range(turns + 1):
        for contender, trainer in contenders.items():
            completed = trainer.step()
            if turn:
                rates[contender].append(
                    completed.non_padding_tokens / completed.seconds
                )
        sys.stderr.write(f"{name}: turn {turn} of {turns}\n")
    return rates


def make_bars(result: Found) -> list[Bar]:
    """Return the bars of the setting without dropout."""
    ours, paper, theirs, paper_recipe, hf_recipe = (
        statistics.median(result.tokens_per_s[name])
        for name in ("ours", "paper", "HF Trainer", "paper recipe", "hf-trainer recipe")
    )
    difference = abs(result.losses["ours"] / result.losses["HF Trainer"] - 1)
    figures = (
        ours / paper,
        ours / theirs,
        paper_recipe / paper,
        abs(hf_recipe / theirs - 1),
        difference,
        result.overhead,
    )
    return bars_of(BARS, dict(zip(BARS, figures, strict=True)))


def measure(place: Path, setting: Setting, steps: int) -> Found:
    """Let all contenders take turns, then let two of them finish."""
    from benchmarks.rivals import Contender, HuggingFace, Ours, Paper

    match = make_match(place, setting, steps)
    ours, theirs = Ours(match), HuggingFace(match)
    paper_recipe, hf_recipe = recipes(match)
    contenders: dict[str, Contender] = {
        "ours": ours,
        "paper": Paper(match),
        "paper recipe": Ours(paper_recipe),
        "HF Trainer": theirs,
        "hf-trainer recipe": Ours(hf_recipe),
    }
    rates = _interleave(setting.name, contenders, setting.turns)
    for name in ("paper", "paper recipe", "hf-trainer recipe"):
        contenders[name].finish()
    losses: dict[str, float] = {}
    if setting.learned:
        for name in ("HF Trainer", "ours"):
            while contenders[name].turns < steps:
                contenders[name].step()
                sys.stderr.write(f"{name}: step {contenders[name].turns} of {steps}\n")
        losses = _validation_losses(match, ours, theirs)
    else:
        ours.finish()
    theirs.finish()
    # Of steps that were taken one after the other; in turns, a row's time holds those
    # of others.
    rows = ours.rows[setting.turns + 2 :] if setting.learned else []
    shares = [1 - (row.compute_s + row.optimizer_s) / row.step_s for row in rows]
    overhead = statistics.median(shares) if shares else None
    return Found(
        tokens_per_s=rates, ceiling=flop_ratio(match), overhead=overhead, losses=losses
    )


def make_match(
    place: Path, setting: Setting, steps: int, shape: dict[str, Any] | None = None
) -> Any:
    """Return a dataset and what the contenders have in common.

    Without a ``shape`` they train BERT.
    """
    from benchmarks.rivals import Match
    from trainer.formats.train_config import (
        EvaluationSettings,
        ModelSettings,
        TrainConfig,
    )
    from trainer.runtime.ranks import join_ranks

    data_dir = write_learnable_corpus(
        place / "data",
        real_lengths(TRAIN_SAMPLES, seed=0),
        real_lengths(VALIDATION_SAMPLES, seed=1),
        vocab_size=setting.vocab_size,
    )
    dropout = {
        "hidden_dropout_prob": setting.dropout,
        "attention_probs_dropout_prob": setting.dropout,
    }
    config = TrainConfig(
        model=ModelSettings(
            name="bench", config=shape or {"model_type": "bert"} | _SIZES | dropout
        ),
        evaluation=EvaluationSettings(max_sequences=VALIDATION_SAMPLES),
        layout="packed",
        seq_length_tokens=ROW_TOKENS,
        micro_batch_size=MICRO_BATCH_ROWS,
        global_batch_samples=SAMPLES_PER_STEP,
        max_steps=steps,
        warmup_steps=WARM_UP_STEPS,
        learning_rate=LEARNING_RATE,
    )
    return Match(
        config=config,
        data_dir=data_dir,
        samples_per_step=SAMPLES_PER_STEP,
        ranks=join_ranks(config, environment={}),
        place=place,
    )


def recipes(match: Any) -> list[Any]:
    """Return recipes for our trainer.

    They have the settings of the paper's trainer and of transformers'.
    """
    recipes = (
        padded(match.config, 1, max_workers=0, limit=""),
        untuned(match.config, 1),
    )
    samples = {
        "global_batch_tokens": None,
        "global_batch_samples": match.samples_per_step,
    }
    return [
        replace(match, config=recipe.config.model_copy(update=samples))
        for recipe in recipes
    ]


def flop_ratio(match: Any) -> float:
    """Return FLOPs with padding and a dense MLM head, over those needed.

    They are per non-padding token.
    """
    import torch

    from trainer.matmul_weights import model_work
    from trainer.model.encoder import build_model

    model = build_model(match.bert_config(), torch.device("meta"))
    lengths = np.minimum(real_lengths(TRAIN_SAMPLES, seed=0) + 2, ROW_TOKENS)
    work = model_work(model)
    needed = work.step_flops(lengths, round(0.15 * int(lengths.sum())))
    padded = np.full(len(lengths), ROW_TOKENS)
    return work.step_flops(padded, int(padded.sum())) / needed


def _validation_losses(match: Any, ours: Any, theirs: Any) -> dict[str, float]:
    """Evaluate both models on the same sequences with the same masks."""
    from trainer.build import build_training
    from trainer.data.dataset import TokenDataset
    from trainer.evaluate import evaluate
    from trainer.formats.run_record import read_run

    ours.finish(abandon=False)
    validation = TokenDataset.open(match.data_dir, "validation")
    manifest = validation.manifest
    training = build_training(
        match.config, manifest.vocab_size, manifest.special_ids, match.ranks
    )
    training.module.model.load_state_dict(theirs.model.state_dict())
    evaluation = evaluate(training.module, validation, match.config, match.ranks, 0)
    ours_loss = read_run(ours.directory).evaluations[-1].loss
    assert ours_loss is not None
    assert evaluation.loss is not None
    return {"ours": ours_loss, "HF Trainer": evaluation.loss}


def _json(result: Found) -> dict[str, Any]:
    return {
        "tokens_per_s": {
            name: list(rates) for name, rates in result.tokens_per_s.items()
        },
        "flop_ratio_ceiling": result.ceiling,
        "step_overhead_share": result.overhead,
        "validation_loss": dict(result.losses),
    }


def _table(result: Found) -> str:
    ours = statistics.median(result.tokens_per_s["ours"])
    rows = []
    for name, rates in result.tokens_per_s.items():
        median = statistics.median(rates)
        loss = f"{result.losses[name]:.3f}" if name in result.losses else ""
        rows.append(
            [
                name,
                f"{median:,.0f}",
                f"{ours / median:.2f}",
                f"{(max(rates) - min(rates)) / median:.0%}",
                loss,
            ]
        )
    table = text_table(
        ["", "tokens/s", "ours is faster by", "spread", "validation loss"], rows
    )
    return (
        f"{table}\nratio of operations, padded and dense over needed:"
        f" {result.ceiling:.2f}\n"
    )


if __name__ == "__main__":
    run(main)
