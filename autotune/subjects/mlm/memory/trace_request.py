"""Requests for traces of the trainer's step."""

from typing import ClassVar

from pydantic import Field

from autotune.corpus.values import SequenceContents
from autotune.memory.decide.memory_model import SlotsOf
from autotune.trials.values import JobName, TrialRequest
from trainer.data.head_slots import head_slots
from trainer.formats.manifest import SpecialIds
from trainer.formats.train_config import TrainConfig


class TraceRequest(TrialRequest):
    """Request for traces of one rank's training steps on the meta device."""

    job: ClassVar[JobName] = "trace"

    config: TrainConfig
    """The trainer's settings; ``sizes`` replaces ``micro_batch_size``."""
    vocab_size: int
    """Tokens of the vocabulary."""
    special_ids: SpecialIds
    """Ids of special tokens in the vocabulary."""
    documents_per_sequence: float
    """Documents in each sequence, on average."""
    micro_batches: int
    """Micro-batches of a rank in an optimizer step. Two need as much memory as any
    larger number: gradients exist while the second one is computed."""
    ranks: int
    """Ranks on all nodes that train together; one of them is traced."""
    sizes: list[int] = Field(default_factory=list)
    """Micro-batch size of each trace."""

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.config.model.name

    @property
    def slots_of(self) -> SlotsOf | None:
        """Function of the slots of a sparse MLM head, by size; None without one."""
        config = self.config
        if config.mlm_head != "sparse":
            return None
        return lambda size: head_slots(
            size * config.seq_length_tokens, config.masking_probability
        )


def trace_request(
    config: TrainConfig, contents: SequenceContents, micro_batches: int, *, ranks: int
) -> TraceRequest:
    """Return the request to trace a step on sequences with such contents.

    Args:
        config: Settings of the step.
        contents: Contents of the sequences.
        micro_batches: Micro-batches of an optimizer step on each rank.
        ranks: Ranks on all nodes that train together.
    """
    return TraceRequest(
        config=config,
        vocab_size=contents.vocab_size,
        special_ids=contents.special_ids,
        documents_per_sequence=contents.documents,
        micro_batches=micro_batches,
        ranks=ranks,
    )
