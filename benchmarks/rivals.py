"""Trainers side by side: each takes one optimizer step when it is its turn.

Each has its own loop, loader and optimizer. All get the same samples, the same shape
and dropout, the same learning rates, and the same number of samples a step; the trainer
under test packs them into sequences.
"""

import queue
import tempfile
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import BertConfig

from autotune.subjects.mlm.jobs.samples import Samples, collator
from benchmarks.paper import PaperModel
from trainer.config.resolve import ResolvedConfig
from trainer.data.dataset import TokenDataset
from trainer.distributed.optimizer import learning_rate
from trainer.formats.run_record import StepRow
from trainer.formats.train_config import TrainConfig
from trainer.loop import train
from trainer.model.encoder_config import build_config
from trainer.record.writer import RunWriter
from trainer.runtime.ranks import Ranks

_START_TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Settings that all contenders share."""

    config: TrainConfig
    """Of the trainer under test; its shape, precision, rates and number of samples a
    step hold for all."""
    data_dir: Path
    samples_per_step: int
    ranks: Ranks
    place: Path
    """For files."""

    @property
    def dataset(self) -> TokenDataset:
        """The training split."""
        return TokenDataset.open(self.data_dir)

    def samples(self) -> Samples:
        """Return the training split as other trainers take it."""
        return Samples(self.dataset, self.config.seq_length_tokens)

    def collator(self, padded_to: int | None = None) -> Any:
        """Return transformers' collator, which pads to a multiple of tokens if any."""
        manifest = self.dataset.manifest
        return collator(manifest.vocab_size, manifest.special_ids, padded_to)

    def bert_config(self) -> BertConfig:
        """Return the shape as transformers' config, for the dataset's vocabulary."""
        manifest = self.dataset.manifest
        config = build_config(
            self.config.model,
            vocab_size=manifest.vocab_size,
            special_ids=manifest.special_ids,
            seq_length_tokens=self.config.seq_length_tokens,
        )
        assert isinstance(config, BertConfig)
        return config


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One optimizer step of a contender."""

    seconds: float
    non_padding_tokens: int


class Contender(ABC):
    """A trainer in its own thread that stops after every optimizer step.

    It continues when it is its turn again.
    """

    matmul_precision = "high"
    """Of fp32 products on a GPU, which is one setting for all threads."""

    def __init__(self, match: Match) -> None:
        self.match = match
        self._go: queue.Queue[bool] = queue.Queue()
        self._done: queue.Queue[Turn | BaseException] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._began_s = 0.0
        self.turns = 0

    @abstractmethod
    def run(self) -> None:
        """Train, and call ``stepped`` after every optimizer step."""

    def step(self) -> Turn:
        """Take one optimizer step, loading and logging included."""
        if self.match.ranks.device.type == "cuda":
            torch.set_float32_matmul_precision(self.matmul_precision)
        self._go.put(True)
        if self._thread is None:
            self._thread = threading.Thread(target=self._main, daemon=True)
            self._thread.start()
        turn = self._done.get(timeout=_START_TIMEOUT_S)
        if isinstance(turn, BaseException):
            raise turn
        self.turns += 1
        return turn

    def stepped(self, non_padding_tokens: int) -> None:
        """End this turn, and wait for the next."""
        if self.match.ranks.device.type == "cuda":
            torch.cuda.synchronize()
        self._done.put(
            Turn(
                seconds=time.perf_counter() - self._began_s,
                non_padding_tokens=non_padding_tokens,
            )
        )
        self._wait()

    def finish(self, *, abandon: bool = True) -> None:
        """End the trainer now, or, after its last step, let it end normally.

        Raises:
            BaseException: The error that its end raised.
        """
        self._go.put(not abandon)
        if self._thread is not None:
            self._thread.join(timeout=_START_TIMEOUT_S)
        if not self._done.empty():
            ending = self._done.get()
            if isinstance(ending, BaseException):
                raise ending

    def _wait(self) -> None:
        if not self._go.get():
            raise _Over
        self._began_s = time.perf_counter()

    def _main(self) -> None:
        try:
            self._wait()
            self.run()
        except _Over:
            pass
        except BaseException as error:  # noqa: BLE001 - handed to the thread that asked for the step
            self._done.put(error)


class _Over(Exception):
    """The match has ended."""


class Ours(Contender):
    """The trainer under test, its whole loop."""

    def __init__(self, match: Match) -> None:
        super().__init__(match)
        self.rows: list[StepRow] = []
        self.directory = Path(tempfile.mkdtemp(prefix="run-", dir=match.place))

    def run(self) -> None:
        """Train from a configuration as ``python -m trainer`` would."""
        resolved = ResolvedConfig(
            config=self.match.config,
            sources={},
            data_dir=self.match.data_dir,
            profile_sha256="0" * 64,
        )
        writer = RunWriter(self.directory)
        train(resolved, self.match.ranks, writer, self._watch)

    def _watch(self, row: object) -> None:
        """End a turn with every logged step, which stands for all since the last."""
        if isinstance(row, StepRow):
            self.rows.append(row)
            self.stepped(row.non_padding_tokens * self.match.config.logged_steps)


class Paper(Contender):
    """The paper's trainer, from its description."""

    matmul_precision = "highest"

    def run(self) -> None:
        """Take steps until no more are requested."""
        config, device = self.match.config, self.match.ranks.device
        torch.manual_seed(config.seed)
        model = PaperModel(self.match.bert_config()).to(device)
        optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
            fused=False,
        )
        micro_batches = self.match.samples_per_step // config.micro_batch_size
        batches = collated(self.match, padded_to=config.seq_length_tokens)
        logged: list[float] = []
        step = 0
        while True:
            non_padding_tokens = 0
            for _ in range(micro_batches):
                batch = next(batches)
                non_padding_tokens += int(batch["attention_mask"].sum())
                labels_BS = batch["labels"].to(device)
                logits_BSV = model(
                    batch["input_ids"].to(device),
                    batch["attention_mask"].to(device).bool(),
                )
                loss = (
                    functional.cross_entropy(
                        logits_BSV.flatten(0, 1), labels_BS.flatten()
                    )
                    / micro_batches
                )
                loss.backward()
                logged.append(loss.item())
            _update(model, optimizer, config, step)
            logged.append(loss.item())
            step += 1
            self.stepped(non_padding_tokens)


class HuggingFace(Contender):
    """transformers' own Trainer with its collator.

    It is set up as its masked-LM recipe: padded to the longest sample.
    """

    def __init__(self, match: Match) -> None:
        super().__init__(match)
        self.model: Any = None

    def run(self) -> None:
        """Train with its own loop."""
        from transformers import (
            BertForMaskedLM,
            Trainer,
            TrainerCallback,
            TrainingArguments,
        )

        config, contender = self.match.config, self
        device = self.match.ranks.device
        torch.manual_seed(config.seed)
        self.model = BertForMaskedLM(self.match.bert_config())
        non_padding_tokens: list[torch.Tensor] = []

        class Counting(Trainer):
            def training_step(
                self, model: Any, inputs: Any, *args: Any, **kwargs: Any
            ) -> Any:
                non_padding_tokens.append(inputs["attention_mask"].sum())
                return super().training_step(model, inputs, *args, **kwargs)

        class Baton(TrainerCallback):
            def on_step_begin(
                self, args: Any, state: Any, control: Any, **kwargs: Any
            ) -> None:
                # Its own warm-up would begin with a step at rate 0.
                for group in kwargs["optimizer"].param_groups:
                    group["lr"] = learning_rate(config, state.global_step)

            def on_step_end(self, *_: Any, **__: Any) -> None:
                real = sum(int(tokens) for tokens in non_padding_tokens)
                non_padding_tokens.clear()
                contender.stepped(real)

        arguments = TrainingArguments(
            output_dir=str(self.match.place / "hf"),
            per_device_train_batch_size=config.micro_batch_size,
            gradient_accumulation_steps=self.match.samples_per_step
            // config.micro_batch_size,
            learning_rate=config.learning_rate,
            weight_decay=config.weight_decay,
            warmup_steps=config.warmup_steps,
            lr_scheduler_type="linear",
            max_grad_norm=config.max_grad_norm,
            max_steps=config.max_steps,
            bf16=config.precision == "bf16",
            use_cpu=device.type == "cpu",
            optim="adamw_torch_fused",
            seed=config.seed,
            report_to=[],
            save_strategy="no",
            logging_steps=500,
            disable_tqdm=True,
            dataloader_num_workers=config.data.num_workers,
            remove_unused_columns=False,
        )
        rows: Any = self.match.samples()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            Counting(
                model=self.model,
                args=arguments,
                train_dataset=rows,
                data_collator=self.match.collator(),
                callbacks=[Baton()],
            ).train()


def _update(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: TrainConfig, step: int
) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(config, step)
    optimizer.step()
    optimizer.zero_grad()


def collated(match: Match, padded_to: int | None = None) -> Iterator[Any]:
    """Yield micro-batches for ever, from transformers' collator behind torch's loader.

    They are padded to the longest sample by default.
    """
    collate = match.collator(padded_to)
    loader: Any = torch.utils.data.DataLoader(
        match.samples(),
        batch_size=match.config.micro_batch_size,
        shuffle=True,
        drop_last=True,
        collate_fn=collate,
        num_workers=match.config.data.num_workers,
        pin_memory=match.ranks.device.type == "cuda",
    )
    while True:
        yield from loader
