"""FLOPs of a training step. No torch here.

A step counts model FLOPs: matmuls of the layers for non-padding tokens, attention
within documents, the MLM head at the tokens to predict, each once forward and twice
backward. Not counted: padding, recomputation, embedding look-ups, normalisation,
softmax, the optimizer.
"""

from dataclasses import dataclass

import numpy as np

from trainer.data.array_types import Int64


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWork:
    """Sizes of a model from which the FLOPs of a step follow."""

    parameters: int
    """Number of all parameters, shared ones counted once."""
    weights_per_token: int
    """Elements of the matrices that every non-padding token is multiplied with, over
    all layers."""
    weights_per_predicted_token: int
    """Elements of the matrices for tokens to predict only: the MLM head's and, if
    sparse, most of the last layer's."""
    attention_width: int
    """Number of attention heads times their size."""
    reaches: tuple[int | None, ...]
    """Reach of each layer's attention to either side, in tokens; None for the whole
    document."""
    last_layer_narrow: bool = False
    """True if the last layer is sparse: its queries are those of tokens to predict."""

    def step_flops(self, lengths: Int64, predicted: int) -> float:
        """Return the FLOPs of one step.

        Args:
            lengths: Non-padding tokens of each document, shape (N,).
            predicted: Number of tokens to predict.
        """
        tokens = float(lengths.sum())
        matmuls = (
            self.weights_per_token * tokens
            + self.weights_per_predicted_token * float(predicted)
        )
        pairs_of_layers = [attended_pairs(lengths, reach) for reach in self.reaches]
        if self.last_layer_narrow and tokens:
            # Every token is equally likely to be predicted, so this is the expected
            # number of pairs.
            pairs_of_layers[-1] *= predicted / tokens
        # Attention multiplies queries with keys, then its weights with values.
        attention = 2 * self.attention_width * sum(pairs_of_layers)
        # The backward pass costs twice the forward pass. Each of these counts is a
        # multiplication and an addition.
        return 3 * 2 * (matmuls + attention)


def attended_pairs(lengths: Int64, reach: int | None) -> float:
    """Return the number of token pairs that attend to each other.

    Args:
        lengths: Tokens of each document, shape (N,).
        reach: Reach of attention to either side, in tokens; None for the whole
            document.
    """
    tokens = lengths.astype(np.float64)
    all_pairs = np.square(tokens)
    if reach is None:
        return float(all_pairs.sum())
    # In a longer document every token sees 2 * reach + 1, less what lies beyond its two
    # ends.
    near_pairs = tokens * (2 * reach + 1) - reach * (reach + 1.0)
    return float(np.where(tokens > reach, near_pairs, all_pairs).sum())
