"""FLOPs of a training step, and peak rates of GPUs. No torch here.

A step counts model FLOPs: matmuls of the layers for non-padding tokens, attention
within documents, the MLM head at the tokens to predict, each once forward and twice
backward. Not counted: padding, recomputation, embedding look-ups, normalisation,
softmax, the optimizer.

Peaks are those of dense matmuls and of links, from the vendors' data sheets, most of
which print figures with structured sparsity; dense is half of that. Read in 2026.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from trainer.data.batch_plan import Int64

NumberFormat = Literal["bf16", "tf32", "fp32"]
GIGA, TERA = 1e9, 1e12


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

    def step_flops(self, lengths: Int64, predicted: int) -> float:
        """Return the FLOPs of one step.

        ``lengths``, shape (N,), are the non-padding tokens of each document.
        """
        tokens = float(lengths.sum())
        matmuls = (
            self.weights_per_token * tokens
            + self.weights_per_predicted_token * float(predicted)
        )
        pairs = [attended_pairs(lengths, reach) for reach in self.reaches]
        if self.last_layer_narrow and tokens:
            # In expectation, as every token is equally likely to be predicted.
            pairs[-1] *= predicted / tokens
        # Queries with keys, and weights with values.
        attention = 2 * self.attention_width * sum(pairs)
        # Forward and backward, each a multiplication and an addition.
        return 3 * 2 * (matmuls + attention)


def attended_pairs(lengths: Int64, reach: int | None) -> float:
    """Return the number of token pairs that attend to each other in documents of ``lengths``, shape (N,)."""
    wide = lengths.astype(np.float64)
    if reach is None:
        return float(np.square(wide).sum())
    # In a longer document every token sees 2 * reach + 1, less what lies beyond its two
    # ends.
    return float(
        np.where(
            wide > reach,
            wide * (2 * reach + 1) - reach * (reach + 1.0),
            np.square(wide),
        ).sum()
    )


class Peak(NamedTuple):
    """Peak rates of one kind of GPU."""

    name: str
    """Words of the GPU's name in its driver; the first row of the table whose words all
    occur matches."""
    bf16: float
    """Dense rate in FLOP/s."""
    tf32: float
    fp32: float
    """Rate in FLOP/s without Tensor Cores."""
    memory_bytes_per_s: float
    link_bytes_per_s: float
    """Bandwidth of all links in both directions: NVLink, or else 16 lanes of PCIe. Not
    checked against data sheets; it only bounds plausible measurements."""
    source: str

    @property
    def fp8(self) -> float | None:
        """Dense float8 rate, twice bf16's on every data sheet with float8.

        None before Ada, without it.
        """
        return None if self.name.split()[0] in _AMPERE else 2 * self.bf16


_ADA = "NVIDIA Ada architecture white paper; sums in fp32"
_PRO = "NVIDIA RTX Blackwell PRO architecture white paper"
_PRO_MAX_Q = (
    "NVIDIA RTX PRO 6000 Max-Q data sheet: an 8th of 3,511 AI TOPS, which are"
    " sparse fp4"
)
_AMPERE = {"A100", "A800", "A40", "A30", "A10"}
_PARTS = {"MIG", "Laptop", "D"}
"""Words that name a part of a GPU, or a GPU with lower peaks than that of the same name
without them."""

# Left out for lack of a data sheet with a dense figure: A10G (sources say 62.5, 70 and
# 125 TFLOP/s in bf16), and RTX PRO 6000 Server Edition (same chip, other clocks and
# power).
PEAKS = (
    Peak(
        "H100 NVL",
        835 * TERA,
        417 * TERA,
        60 * TERA,
        3.9 * TERA,
        600 * GIGA,
        "NVIDIA H100 data sheet, NVL",
    ),
    Peak(
        "H100 PCIe",
        756 * TERA,
        378 * TERA,
        51 * TERA,
        2 * TERA,
        600 * GIGA,
        "NVIDIA H100 data sheet, PCIe",
    ),
    Peak(
        "H100",
        989 * TERA,
        494 * TERA,
        67 * TERA,
        3.35 * TERA,
        900 * GIGA,
        "NVIDIA H100 data sheet, SXM",
    ),
    Peak(
        "H200 NVL",
        835 * TERA,
        417 * TERA,
        60 * TERA,
        4.8 * TERA,
        900 * GIGA,
        "NVIDIA H200 data sheet, NVL",
    ),
    Peak(
        "H200",
        989 * TERA,
        494 * TERA,
        67 * TERA,
        4.8 * TERA,
        900 * GIGA,
        "NVIDIA H200 data sheet, SXM",
    ),
    Peak(
        "GH200",
        989 * TERA,
        494 * TERA,
        67 * TERA,
        4 * TERA,
        900 * GIGA,
        "NVIDIA GH200 data sheet",
    ),
    Peak(
        "H800 PCIe",
        756 * TERA,
        378 * TERA,
        51 * TERA,
        2 * TERA,
        400 * GIGA,
        "NVIDIA H800 data sheet, PCIe",
    ),
    Peak(
        "H800",
        989 * TERA,
        494 * TERA,
        67 * TERA,
        3.35 * TERA,
        400 * GIGA,
        "NVIDIA H800 data sheet, SXM",
    ),
    Peak(
        "H20",
        148 * TERA,
        74 * TERA,
        44 * TERA,
        4 * TERA,
        900 * GIGA,
        "specifications that sellers print",
    ),
    Peak(
        "B200",
        2250 * TERA,
        1100 * TERA,
        75 * TERA,
        8 * TERA,
        1800 * GIGA,
        "NVIDIA HGX B200 data sheet",
    ),
    Peak(
        "GB200",
        2500 * TERA,
        1250 * TERA,
        80 * TERA,
        8 * TERA,
        1800 * GIGA,
        "a 72nd of NVIDIA GB200 NVL72's",
    ),
    Peak(
        "B300",
        2250 * TERA,
        1125 * TERA,
        75 * TERA,
        8 * TERA,
        1800 * GIGA,
        "an 8th of NVIDIA HGX B300's",
    ),
    Peak(
        "GB300",
        2500 * TERA,
        1250 * TERA,
        80 * TERA,
        8 * TERA,
        1800 * GIGA,
        "a 72nd of NVIDIA GB300 NVL72's",
    ),
    Peak(
        "A100 40GB",
        312 * TERA,
        156 * TERA,
        19.5 * TERA,
        1.555 * TERA,
        600 * GIGA,
        "NVIDIA A100 data sheet",
    ),
    Peak(
        "A100",
        312 * TERA,
        156 * TERA,
        19.5 * TERA,
        2.039 * TERA,
        600 * GIGA,
        "NVIDIA A100 data sheet",
    ),
    Peak(
        "A800",
        312 * TERA,
        156 * TERA,
        19.5 * TERA,
        2.039 * TERA,
        400 * GIGA,
        "NVIDIA A800 data sheet",
    ),
    Peak(
        "A40",
        150 * TERA,
        75 * TERA,
        37 * TERA,
        696 * GIGA,
        112.5 * GIGA,
        "NVIDIA A40 data sheet",
    ),
    Peak(
        "A30",
        165 * TERA,
        82 * TERA,
        10.3 * TERA,
        933 * GIGA,
        200 * GIGA,
        "NVIDIA A30 data sheet",
    ),
    Peak(
        "A10",
        125 * TERA,
        62.5 * TERA,
        31 * TERA,
        600 * GIGA,
        64 * GIGA,
        "NVIDIA A10 data sheet",
    ),
    Peak(
        "L40S",
        362 * TERA,
        183 * TERA,
        91.6 * TERA,
        864 * GIGA,
        64 * GIGA,
        "NVIDIA L40S data sheet",
    ),
    Peak(
        "L40",
        181 * TERA,
        90.5 * TERA,
        90.5 * TERA,
        864 * GIGA,
        64 * GIGA,
        "NVIDIA L40 data sheet",
    ),
    Peak(
        "RTX 6000 Ada", 364 * TERA, 182 * TERA, 91 * TERA, 960 * GIGA, 64 * GIGA, _ADA
    ),
    Peak(
        "RTX 4090", 165 * TERA, 82.6 * TERA, 82.6 * TERA, 1.008 * TERA, 64 * GIGA, _ADA
    ),
    Peak(
        "RTX PRO 6000 Max Q",
        438 * TERA,
        219 * TERA,
        110 * TERA,
        1.792 * TERA,
        128 * GIGA,
        _PRO_MAX_Q,
    ),
    Peak(
        "RTX PRO 6000 Workstation",
        504 * TERA,
        252 * TERA,
        126 * TERA,
        1.792 * TERA,
        128 * GIGA,
        _PRO,
    ),
    Peak(
        "L4",
        121 * TERA,
        60 * TERA,
        30 * TERA,
        300 * GIGA,
        64 * GIGA,
        "NVIDIA L4 data sheet",
    ),
)


def matmul_format(precision: Literal["fp32", "bf16"], *, tf32: bool) -> NumberFormat:
    """Return the number format in which a GPU computes matmuls under these settings."""
    return "bf16" if precision == "bf16" else "tf32" if tf32 else "fp32"


def peak_flops_per_s(device_name: str, number_format: NumberFormat) -> float | None:
    """Return the dense peak of a device, or None if it is not in the table, such as a part of a GPU (MIG)."""
    found = find_peak(device_name)
    return None if found is None else float(getattr(found, number_format))


def find_peak(device_name: str) -> Peak | None:
    """Return the peak rates of a device, or None if it is not in the table, such as a part of a GPU (MIG)."""
    words = set(device_name.replace("-", " ").split())
    if words & _PARTS:
        return None
    return next((peak for peak in PEAKS if words.issuperset(peak.name.split())), None)
