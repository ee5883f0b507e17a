"""How simulators draw what differs between machines."""

import math
import random
from collections.abc import Sequence

import numpy as np


def log_uniform(
    draw: "random.Random | np.random.Generator", bounds: Sequence[float]
) -> float:
    """Draw a number whose logarithm is uniform between these bounds.

    The number itself is uniform if the lower bound is 0.
    """
    low, high = bounds
    return (
        math.exp(draw.uniform(math.log(low), math.log(high)))
        if low > 0
        else float(draw.uniform(low, high))
    )
