"""``python -m benchmarks.trainers NAME --data DIR``: another trainer's throughput.

transformers' own ``Trainer`` with its own loop, collator and optimizer, in several
configurations, or the recipe of the paper's public trainer. Rates are non-padding
tokens/s after the first steps, and mean what they do in this project's run records.
"""

import argparse
import contextlib
import gc
import json
import math
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from autotune.subjects.mlm.baselines.comparison import (
    PAPER_MICRO_BATCH_SIZE,
    PAPER_WORKERS,
)
from autotune.subjects.mlm.jobs.paper_model import RecipeModel, RecipeStep
from autotune.subjects.mlm.jobs.samples import Samples, collator
from autotune.trials.decide.plausibility import least_flops_per_token
from benchmarks.gpu.step_settings import step_config
from trainer.data.dataset import TokenDataset
from trainer.formats.presets import model_settings
from trainer.model.encoder_config import build_config
from trainer.runtime.out_of_memory import out_of_memory

WARM_UP, LEAST_STEPS, TINY_S = 5, 5, 0.5
GROUP_STEPS = 50
"""Steps of a group of samples that transformers sorts by length."""
SIZE_STEP, BYTES_OF_256 = 32, 80 * 10**9
"""Search of the largest batch: by 32 samples, from 256 for each 80 GB on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSetup:
    """One configuration of transformers' Trainer."""

    words: str
    """Its settings, in words."""
    batch: int | None = 8
    """Samples of a batch; None for the largest that fits."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further ``TrainingArguments``."""
    is_padded: bool = False
    """True if samples are padded to the sequence length, else to the longest."""
    steps_multiple: int = 1
    """Number of steps of which a measurement has a multiple."""


_BF16: dict[str, Any] = {"bf16": True, "dataloader_num_workers": 8}
SETUPS = {
    "compiled": TrainerSetup(
        words="bf16, batch 128, 8 workers, torch_compile=True, padded to full length",
        batch=128,
        arguments={**_BF16, "torch_compile": True},
        is_padded=True,
    ),
    "bf16": TrainerSetup(
        words="bf16, batch 128, 8 workers, dynamic padding",
        batch=128,
        arguments=_BF16,
    ),
    "grouped": TrainerSetup(
        words="bf16, grouped by length, largest batch, 8 workers, dynamic padding",
        batch=None,
        arguments={**_BF16, "train_sampling_strategy": "group_by_length"},
        steps_multiple=GROUP_STEPS,
    ),
    "defaults": TrainerSetup(
        words="defaults: fp32, batch 8, 0 workers, dynamic padding"
    ),
}
PAPER = "paper"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Options of every trainer."""

    model: str
    data: Path
    seq_length_tokens: int
    seconds: float
    """Time to measure."""
    is_tiny: bool
    """True to try the measurement itself, with small batches and without a compiler."""

    @property
    def dataset(self) -> TokenDataset:
        """The training split."""
        return TokenDataset.open(self.data)

    @property
    def samples(self) -> Any:
        """The training split as other trainers take it."""
        return Samples(self.dataset, self.seq_length_tokens)

    def collator(self, padded_to: int | None) -> Any:
        """Return transformers' collator, which pads to a multiple of tokens if any."""
        manifest = self.dataset.manifest
        return collator(manifest.vocab_size, manifest.special_ids, padded_to)

    def size(self, batch: int) -> int:
        """Return the samples of a batch."""
        return min(batch, 4) if self.is_tiny else batch


@dataclass(slots=True)
class MeasuredSteps:
    """Measured steps, between two waits for the GPU."""

    seconds: float
    steps_multiple: int = 1
    tokens: list[Any] = field(default_factory=list)
    """Non-padding tokens of each batch."""
    steps: int = 0
    began_s: float | None = None
    ended_s: float = math.nan

    def stepped(self) -> bool:
        """Count a step, and return whether these were enough."""
        self.steps += 1
        if self.began_s is None:
            if self.steps == WARM_UP:
                torch.cuda.synchronize()
                self.tokens.clear()
                self.steps, self.began_s = 0, time.perf_counter()
            return False
        if self.steps < LEAST_STEPS or self.steps % self.steps_multiple:
            return False
        if time.perf_counter() - self.began_s < self.seconds:
            return False
        torch.cuda.synchronize()
        self.ended_s = time.perf_counter()
        return True

    def figures(self) -> dict[str, Any]:
        """Return the rate of the measured steps."""
        assert self.began_s is not None
        seconds = self.ended_s - self.began_s
        tokens = sum(int(count) for count in self.tokens)
        return {
            "tokens_per_s": tokens / seconds,
            "steps": self.steps,
            "step_s": seconds / self.steps,
            "peak_bytes": torch.cuda.max_memory_reserved(),
        }


def main() -> int:
    """Measure one trainer, print JSON, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.trainers",
        description="Measure the throughput of another trainer.",
    )
    parser.add_argument("name", choices=[*SETUPS, PAPER])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="bert-120m")
    parser.add_argument("--seq-length", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--tiny", action="store_true", help="try the benchmark itself")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    work = Workload(
        model=options.model,
        data=options.data,
        seq_length_tokens=options.seq_length,
        seconds=TINY_S if options.tiny else options.seconds,
        is_tiny=options.tiny,
    )
    # The Trainer prints its metrics.
    with contextlib.redirect_stdout(sys.stderr):
        if options.name == PAPER:
            answer = measure_paper(work)
        else:
            answer = measure_trainer(SETUPS[options.name], work)
    config = step_config(options.model, 1, {}, seq_length_tokens=options.seq_length)
    flops_per_token = least_flops_per_token(config, None)
    answer["model_flops_per_s"] = answer["tokens_per_s"] * flops_per_token
    versions = {"torch": torch.__version__}
    print(
        json.dumps(
            {"trainer": options.name, "model": options.model, **versions, **answer}
        )
    )
    return 0


def measure_trainer(setup: TrainerSetup, work: Workload) -> dict[str, Any]:
    """Return the figures of transformers' Trainer.

    Raises:
        torch.OutOfMemoryError: If no batch fits.
    """
    tried = []
    for batch in [setup.batch] if setup.batch else list(_sizes()):
        size = work.size(batch)
        try:
            figures = _train(setup, work, size)
        except RuntimeError as error:
            if out_of_memory(error) is None:
                raise
            tried.append(size)
            sys.stderr.write(f"{size} samples: out of memory\n")
        else:
            return {
                "settings": setup.words,
                "batch": size,
                "out_of_memory": tried,
                **figures,
            }
        gc.collect()
        torch.cuda.empty_cache()
    raise torch.OutOfMemoryError("no batch fits")


def _sizes() -> Iterator[int]:
    """Yield batches, the largest first, by the memory of the GPU."""
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    most = round(256 * total_bytes / BYTES_OF_256 / SIZE_STEP) * SIZE_STEP
    yield from range(most, 0, -SIZE_STEP)


def _train(setup: TrainerSetup, work: Workload, batch: int) -> dict[str, Any]:
    """Train with transformers' Trainer, and return the rate.

    Samples that are grouped by length begin with the longest, so that a batch that does
    not fit runs out of memory at once.
    """
    window = MeasuredSteps(work.seconds, 1 if work.is_tiny else setup.steps_multiple)

    class CountingTrainer(Trainer):
        def training_step(
            self, model: Any, inputs: Any, *args: Any, **kwargs: Any
        ) -> Any:
            window.tokens.append(inputs["attention_mask"].sum())
            return super().training_step(model, inputs, *args, **kwargs)

    class Timing(TrainerCallback):
        def on_step_end(
            self, args: Any, state: Any, control: Any, **kwargs: Any
        ) -> None:
            control.should_training_stop = window.stepped()

    torch.manual_seed(0)
    padded_to = work.seq_length_tokens if setup.is_padded else None
    with tempfile.TemporaryDirectory(prefix="trainer-") as place:
        trainer = CountingTrainer(
            model=_bert(work),
            args=_arguments(setup, work, batch, place),
            train_dataset=work.samples,
            data_collator=work.collator(padded_to),
            callbacks=[Timing()],
        )
        trainer.train()
    return window.figures()


def _bert(work: Workload) -> BertForMaskedLM:
    """Return a new model of the same shape and dropout as ours."""
    manifest = work.dataset.manifest
    config = build_config(
        model_settings(work.model),
        vocab_size=manifest.vocab_size,
        special_ids=manifest.special_ids,
        seq_length_tokens=work.seq_length_tokens,
    )
    assert isinstance(config, BertConfig)
    return BertForMaskedLM(config)


def _arguments(setup: TrainerSetup, work: Workload, batch: int, place: str) -> Any:
    """Return transformers' arguments; all that are not named are its defaults."""
    arguments: dict[str, Any] = dict(setup.arguments)
    if work.is_tiny:
        arguments.pop("torch_compile", None)
    known = TrainingArguments.__dataclass_fields__
    if "train_sampling_strategy" in arguments and "group_by_length" in known:
        # Its name before it became a strategy.
        del arguments["train_sampling_strategy"]
        arguments["group_by_length"] = True
    training_arguments: Any = TrainingArguments(
        output_dir=place,
        per_device_train_batch_size=batch,
        max_steps=10**6,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **arguments,
    )
    # With several GPUs, the Trainer would split each batch among them. It has no
    # argument for this, and reads this attribute once devices are set up.
    if training_arguments.n_gpu > 1:
        training_arguments._n_gpu = 1
    return training_arguments


def measure_paper(work: Workload) -> dict[str, Any]:
    """Return the figures of the paper's recipe."""
    torch.set_float32_matmul_precision("highest")
    torch.manual_seed(0)
    manifest = work.dataset.manifest
    first_word = max(manifest.special_ids.all()) + 1
    shape = model_settings(work.model).config
    # Its positions follow from values, which a pretended GPU does not compute.
    device = torch.device("cpu" if work.is_tiny else "cuda")
    model = RecipeModel(shape, manifest.vocab_size, work.seq_length_tokens, first_word)
    step = RecipeStep(model.to(device), device)
    window = MeasuredSteps(work.seconds)
    batch = work.size(PAPER_MICRO_BATCH_SIZE)
    loader = torch.utils.data.DataLoader(
        work.samples,
        batch_size=batch,
        shuffle=True,
        drop_last=True,
        collate_fn=work.collator(work.seq_length_tokens),
        num_workers=PAPER_WORKERS,
    )
    for collated in _endless(lambda: iter(loader)):
        window.tokens.append(collated["attention_mask"].sum())
        step.run(collated)
        if window.stepped():
            break
    settings = "the paper's recipe: fp32, padded to full length, batch 64, 8 workers"
    return {"settings": settings, "batch": batch, **window.figures()}


def _endless(begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Yield batches for ever, epoch by epoch."""
    while True:
        yield from begin()


if __name__ == "__main__":
    sys.exit(main())
