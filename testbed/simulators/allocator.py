"""References of predicted peaks.

They are the CPU allocator's own account of real steps, and torch's own prediction.
torch's profiler records every request to the CPU's allocator and every release,
whatever its source. The trainer's own steps run under it on real tensors; no part of
the prediction of peaks takes part.
"""

import gc
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForMaskedLM

from autotune.subjects.mlm.jobs.worst_case import fullest_batch
from trainer.build import build_training
from trainer.formats.manifest import SpecialIds
from trainer.formats.train_config import (
    ModelSettings,
    TrainConfig,
    gradient_accumulation_steps,
)
from trainer.model.encoder_config import build_config
from trainer.runtime.ranks import Ranks

STEPS = 2
"""The first makes the optimizer's state; the second is like all others."""
SPECIAL_IDS = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
_MEMORY_EVENT = "[memory]"

_SHAPE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
}
_MODELS: dict[str, dict[str, Any]] = {
    "bert": {"model_type": "bert", "max_position_embeddings": 512},
    "roberta": {"model_type": "roberta", "max_position_embeddings": 514},
    "modernbert": {
        "model_type": "modernbert",
        "max_position_embeddings": 8192,
        "intermediate_size": 384,
    },
    "electra": {"model_type": "electra", "max_position_embeddings": 512},
}
_DROPOUT_KEYS = {
    "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "roberta": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "modernbert": ("attention_dropout", "embedding_dropout", "mlp_dropout"),
    "electra": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A configuration whose step runs on a CPU within seconds."""

    family: str
    dropout: float
    vocab_size: int
    rows: int
    width: int = 256
    documents_per_sequence: float = 1.0
    micro_batches: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the trainer, where they are not its defaults."""
    shape: Mapping[str, Any] = field(default_factory=dict)
    """Of the model, where it is another one."""

    @property
    def name(self) -> str:
        """As printed."""
        more = [f"{key} {value}" for key, value in self.settings.items()]
        if self.micro_batches > 1:
            more.append(f"{self.micro_batches} micro-batches")
        if self.documents_per_sequence > 1:
            more.append(f"{self.documents_per_sequence:g} documents a row")
        size = f"V {self.vocab_size:,}, {self.rows} x {self.width}"
        return ", ".join([self.family, f"dropout {self.dropout:g}", size, *more])

    @property
    def config(self) -> TrainConfig:
        """As the trainer takes it, on a CPU."""
        rates = dict.fromkeys(_DROPOUT_KEYS[self.family], self.dropout)
        shape = _SHAPE | _MODELS[self.family] | rates | dict(self.shape)
        table: dict[str, Any] = {
            "model": ModelSettings(name=self.family, config=shape),
            "layout": "packed",
            "device": "cpu",
            "seq_length_tokens": self.width,
            "micro_batch_size": self.rows,
            "global_batch_size": self.rows * self.micro_batches,
        }
        return TrainConfig.model_validate(table | dict(self.settings))


HEAD_VOCAB_SIZE, LAYER_VOCAB_SIZE = 30_522, 512
"""With the first the peak lies in the prediction head, with the second in the
layers."""

CASES = (
    Case(family="bert", dropout=0.1, vocab_size=HEAD_VOCAB_SIZE, rows=16),
    Case(family="bert", dropout=0.0, vocab_size=HEAD_VOCAB_SIZE, rows=16),
    Case(
        family="bert",
        dropout=0.0,
        vocab_size=HEAD_VOCAB_SIZE,
        rows=4,
        settings={"mlm_head": "dense"},
    ),
    Case(
        family="bert",
        dropout=0.1,
        vocab_size=HEAD_VOCAB_SIZE,
        rows=16,
        settings={"precision": "bf16"},
    ),
    Case(family="bert", dropout=0.1, vocab_size=LAYER_VOCAB_SIZE, rows=16),
    Case(
        family="bert",
        dropout=0.0,
        vocab_size=LAYER_VOCAB_SIZE,
        rows=16,
        settings={"activation_checkpointing": "full"},
    ),
    Case(
        family="bert",
        dropout=0.1,
        vocab_size=LAYER_VOCAB_SIZE,
        rows=16,
        settings={"activation_checkpointing": "full"},
    ),
    Case(
        family="bert",
        dropout=0.0,
        vocab_size=LAYER_VOCAB_SIZE,
        rows=16,
        settings={"activation_checkpointing": "selective", "precision": "bf16"},
    ),
    Case(
        family="bert",
        dropout=0.1,
        vocab_size=LAYER_VOCAB_SIZE,
        rows=16,
        settings={"layout": "padded"},
    ),
    Case(
        family="bert",
        dropout=0.0,
        vocab_size=LAYER_VOCAB_SIZE,
        rows=16,
        documents_per_sequence=3.0,
        micro_batches=2,
    ),
    Case(
        family="roberta",
        dropout=0.1,
        vocab_size=HEAD_VOCAB_SIZE,
        rows=8,
        micro_batches=2,
    ),
    Case(
        family="roberta",
        dropout=0.1,
        vocab_size=LAYER_VOCAB_SIZE,
        rows=16,
        settings={"precision": "bf16"},
    ),
    Case(
        family="roberta",
        dropout=0.1,
        vocab_size=LAYER_VOCAB_SIZE,
        rows=16,
        settings={"activation_checkpointing": "full", "precision": "bf16"},
    ),
    Case(family="modernbert", dropout=0.0, vocab_size=HEAD_VOCAB_SIZE, rows=16),
    Case(
        family="modernbert",
        dropout=0.0,
        vocab_size=LAYER_VOCAB_SIZE,
        rows=8,
        settings={"precision": "bf16"},
    ),
    Case(
        family="modernbert",
        dropout=0.1,
        vocab_size=LAYER_VOCAB_SIZE,
        rows=8,
        documents_per_sequence=2.0,
    ),
    Case(
        family="modernbert",
        dropout=0.0,
        vocab_size=LAYER_VOCAB_SIZE,
        rows=8,
        settings={"activation_checkpointing": "full"},
    ),
    Case(
        family="modernbert",
        dropout=0.1,
        vocab_size=LAYER_VOCAB_SIZE,
        rows=16,
        settings={
            "activation_checkpointing": "selective",
            "precision": "bf16",
            "layout": "padded",
        },
    ),
    Case(
        family="electra",
        dropout=0.1,
        vocab_size=LAYER_VOCAB_SIZE,
        rows=8,
        settings={"layout": "padded"},
    ),
)
"""Families, dropout, precisions, layouts, heads, checkpointing, accumulation; peaks in
the head and in the layers."""


def allocator_peak_bytes(case: Case) -> int:
    """Return the highest memory of building the model and taking steps.

    It is from the allocator's own account, from empty.
    """
    config = case.config
    alone = Ranks(
        rank=0,
        local_rank=0,
        local_world_size=1,
        world_size=1,
        device=torch.device("cpu"),
    )
    torch.manual_seed(0)
    # What earlier work left in cycles would be released within, as if it had been taken
    # there.
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        training = build_training(config, case.vocab_size, SPECIAL_IDS, alone)
        for _ in range(STEPS):
            batches = [
                fullest_batch(
                    config,
                    case.vocab_size,
                    SPECIAL_IDS,
                    documents_per_sequence=case.documents_per_sequence,
                )
                for _ in range(gradient_accumulation_steps(config, 1))
            ]
            training.step.run(batches, config.learning_rate)
    changes = [
        (event.start_ns(), event.nbytes())
        for event in profiled.profiler.kineto_results.events()
        if event.name() == _MEMORY_EVENT
    ]
    held = highest = 0
    for _, change_bytes in sorted(changes, key=lambda change: change[0]):
        held += change_bytes
        highest = max(highest, held)
    return highest


def fake_peak_bytes(
    model: ModelSettings, vocab_size: int, rows: int, width: int
) -> int:
    """Return the peak that torch's ``MemTracker`` finds.

    It is for transformers' model and AdamW on fake tensors of a CPU.
    """
    config = build_config(
        model, vocab_size=vocab_size, special_ids=SPECIAL_IDS, seq_length_tokens=width
    )
    with FakeTensorMode():
        module = AutoModelForMaskedLM.from_config(config).train()
        optimizer = torch.optim.AdamW(module.parameters(), fused=True)
        tracker = MemTracker()
        tracker.track_external(module, optimizer)
        with tracker:
            for _ in range(STEPS):
                # It takes a second forward for a mistake otherwise.
                tracker.reset_mod_stats()
                ids_BS, labels_BS = (
                    torch.randint(vocab_size, (rows, width)) for _ in range(2)
                )
                module(input_ids=ids_BS, labels=labels_BS).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    peak: int = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    return peak
