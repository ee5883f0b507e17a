"""What a training step has to compute, in floating-point operations. Pure, no torch here.

Counted is what the mathematics asks for: matrix products of the layers for real tokens, attention within documents, the
head at the tokens to predict, each once forward and twice backward. Not counted: padding, recomputation, the look-up of
embeddings, normalisation, softmax, the optimizer. The other common count, six times all parameters for each real token,
is given beside it.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]

_FORWARD_AND_BACKWARD = 3
_MULTIPLY_AND_ADD = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWork:
    """What a model costs, by what the cost grows with."""

    parameters: int
    """All of them, shared ones once."""
    weights_per_token: int
    """Elements of the matrices that every real token is multiplied with, over all layers."""
    weights_per_predicted_token: int
    """Of those that only tokens to predict need: the head's, and where the last layer is narrow, most of its."""
    attention_width: int
    """Heads times their size."""
    reaches: tuple[int | None, ...]
    """How far each layer's attention looks to either side; None for all of the document."""

    last_layer_narrow: bool = False
    """Whether only tokens to predict ask in the last layer's attention."""

    def step_flops(self, lengths: Int64, predicted: int) -> float:
        """Operations of one step.

        Args:
            lengths: Shape (N,), real tokens of each document.
            predicted: Tokens to predict.
        """
        tokens = float(lengths.sum())
        products = self.weights_per_token * tokens + self.weights_per_predicted_token * float(predicted)
        pairs = [attended_pairs(lengths, reach) for reach in self.reaches]
        if self.last_layer_narrow and tokens:
            # In expectation, as every token is equally likely to be predicted.
            pairs[-1] *= predicted / tokens
        # Queries with keys, and weights with values.
        attention = 2 * self.attention_width * sum(pairs)
        return _FORWARD_AND_BACKWARD * _MULTIPLY_AND_ADD * (products + attention)

    def six_n_flops(self, tokens: float) -> float:
        """The 6 N convention (Kaplan et al. 2020): embeddings and a head on every token included, attention not."""
        return 6.0 * self.parameters * tokens


def attended_pairs(lengths: Int64, reach: int | None) -> float:
    """Pairs of tokens that attend to each other, over all documents; shape (N,) to a number."""
    wide = lengths.astype(np.float64)
    if reach is None:
        return float(np.square(wide).sum())
    # In a longer document every token sees 2 * reach + 1, less what lies beyond its two ends.
    return float(np.where(wide > reach, wide * (2 * reach + 1) - reach * (reach + 1.0), np.square(wide)).sum())
