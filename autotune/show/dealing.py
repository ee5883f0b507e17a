"""How a global batch is dealt, in one sentence."""

from autotune.decide.choose import deal
from trainer.config import TrainConfig


def dealing_words(train: TrainConfig, local_ranks: int) -> str:
    """Micro-batches and rows on so many ranks, and which rows are empty."""
    dealing = deal(train.global_batch_rows, train.micro_batch_rows, local_ranks)
    told = (
        f"a global batch of {_count(train.global_batch_rows, 'row')} is "
        f"{_count(dealing.micro_batches, 'micro-batch')} of {_count(dealing.rows_per_micro_batch, 'row')}"
    )
    if local_ranks > 1:
        told += f" on each of {local_ranks} ranks"
    if dealing.empty_rows:
        without = " or ".join(map(str, dealing.without_empty))
        told += f", {_count(dealing.empty_rows, 'row')} of them empty; none would be with {without} rows"
    return told


def _count(number: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith("ch") else "s")
    return f"{number} {noun if number == 1 else plural}"
