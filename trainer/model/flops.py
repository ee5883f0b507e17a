"""FLOPs of a training step, and peak rates of GPUs. No torch here.

A step counts model FLOPs: matmuls of the layers for non-padding tokens, attention
within documents, the MLM head at the tokens to predict, each once forward and twice
backward. Not counted: padding, recomputation, embedding look-ups, normalisation,
softmax, the optimizer.

Peaks are those of dense matmuls and of links, from the vendors' data sheets, most of
which print figures with structured sparsity; dense is half of that. Read in 2026.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from trainer.data.batch_plan import Int64

NumberFormat = Literal["bf16", "tf32", "fp32"]
GIGA = 1e9
TERA = 1e12


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
        pairs = [attended_pairs(lengths, reach) for reach in self.reaches]
        if self.last_layer_narrow and tokens:
            # In expectation, as every token is equally likely to be predicted.
            pairs[-1] *= predicted / tokens
        # Queries with keys, and weights with values.
        attention = 2 * self.attention_width * sum(pairs)
        # Forward and backward, each a multiplication and an addition.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Peak rates of one kind of GPU."""

    name: str
    """Words of the GPU's name in its driver; the first row of the table whose words all
    occur matches."""
    bf16: float
    """Dense rate in FLOP/s."""
    tf32: float
    """Dense rate in FLOP/s."""
    fp32: float
    """Rate in FLOP/s without Tensor Cores."""
    memory_bytes_per_s: float
    link_bytes_per_s: float
    """Bandwidth of all links in both directions: NVLink, or else 16 lanes of PCIe. Not
    checked against data sheets; it only bounds plausible measurements."""
    source: str

    @property
    def fp8(self) -> float | None:
        """Dense float8 rate in FLOP/s, twice bf16's on every data sheet with float8.

        GPUs before Ada have no float8, so it is None for them.
        """
        generation = self.name.split()[0]
        return None if generation in _AMPERE else 2 * self.bf16


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
        name="H100 NVL",
        bf16=835 * TERA,
        tf32=417 * TERA,
        fp32=60 * TERA,
        memory_bytes_per_s=3.9 * TERA,
        link_bytes_per_s=600 * GIGA,
        source="NVIDIA H100 data sheet, NVL",
    ),
    Peak(
        name="H100 PCIe",
        bf16=756 * TERA,
        tf32=378 * TERA,
        fp32=51 * TERA,
        memory_bytes_per_s=2 * TERA,
        link_bytes_per_s=600 * GIGA,
        source="NVIDIA H100 data sheet, PCIe",
    ),
    Peak(
        name="H100",
        bf16=989 * TERA,
        tf32=494 * TERA,
        fp32=67 * TERA,
        memory_bytes_per_s=3.35 * TERA,
        link_bytes_per_s=900 * GIGA,
        source="NVIDIA H100 data sheet, SXM",
    ),
    Peak(
        name="H200 NVL",
        bf16=835 * TERA,
        tf32=417 * TERA,
        fp32=60 * TERA,
        memory_bytes_per_s=4.8 * TERA,
        link_bytes_per_s=900 * GIGA,
        source="NVIDIA H200 data sheet, NVL",
    ),
    Peak(
        name="H200",
        bf16=989 * TERA,
        tf32=494 * TERA,
        fp32=67 * TERA,
        memory_bytes_per_s=4.8 * TERA,
        link_bytes_per_s=900 * GIGA,
        source="NVIDIA H200 data sheet, SXM",
    ),
    Peak(
        name="GH200",
        bf16=989 * TERA,
        tf32=494 * TERA,
        fp32=67 * TERA,
        memory_bytes_per_s=4 * TERA,
        link_bytes_per_s=900 * GIGA,
        source="NVIDIA GH200 data sheet",
    ),
    Peak(
        name="H800 PCIe",
        bf16=756 * TERA,
        tf32=378 * TERA,
        fp32=51 * TERA,
        memory_bytes_per_s=2 * TERA,
        link_bytes_per_s=400 * GIGA,
        source="NVIDIA H800 data sheet, PCIe",
    ),
    Peak(
        name="H800",
        bf16=989 * TERA,
        tf32=494 * TERA,
        fp32=67 * TERA,
        memory_bytes_per_s=3.35 * TERA,
        link_bytes_per_s=400 * GIGA,
        source="NVIDIA H800 data sheet, SXM",
    ),
    Peak(
        name="H20",
        bf16=148 * TERA,
        tf32=74 * TERA,
        fp32=44 * TERA,
        memory_bytes_per_s=4 * TERA,
        link_bytes_per_s=900 * GIGA,
        source="specifications that sellers print",
    ),
    Peak(
        name="B200",
        bf16=2250 * TERA,
        tf32=1100 * TERA,
        fp32=75 * TERA,
        memory_bytes_per_s=8 * TERA,
        link_bytes_per_s=1800 * GIGA,
        source="NVIDIA HGX B200 data sheet",
    ),
    Peak(
        name="GB200",
        bf16=2500 * TERA,
        tf32=1250 * TERA,
        fp32=80 * TERA,
        memory_bytes_per_s=8 * TERA,
        link_bytes_per_s=1800 * GIGA,
        source="a 72nd of NVIDIA GB200 NVL72's",
    ),
    Peak(
        name="B300",
        bf16=2250 * TERA,
        tf32=1125 * TERA,
        fp32=75 * TERA,
        memory_bytes_per_s=8 * TERA,
        link_bytes_per_s=1800 * GIGA,
        source="an 8th of NVIDIA HGX B300's",
    ),
    Peak(
        name="GB300",
        bf16=2500 * TERA,
        tf32=1250 * TERA,
        fp32=80 * TERA,
        memory_bytes_per_s=8 * TERA,
        link_bytes_per_s=1800 * GIGA,
        source="a 72nd of NVIDIA GB300 NVL72's",
    ),
    Peak(
        name="A100 40GB",
        bf16=312 * TERA,
        tf32=156 * TERA,
        fp32=19.5 * TERA,
        memory_bytes_per_s=1.555 * TERA,
        link_bytes_per_s=600 * GIGA,
        source="NVIDIA A100 data sheet",
    ),
    Peak(
        name="A100",
        bf16=312 * TERA,
        tf32=156 * TERA,
        fp32=19.5 * TERA,
        memory_bytes_per_s=2.039 * TERA,
        link_bytes_per_s=600 * GIGA,
        source="NVIDIA A100 data sheet",
    ),
    Peak(
        name="A800",
        bf16=312 * TERA,
        tf32=156 * TERA,
        fp32=19.5 * TERA,
        memory_bytes_per_s=2.039 * TERA,
        link_bytes_per_s=400 * GIGA,
        source="NVIDIA A800 data sheet",
    ),
    Peak(
        name="A40",
        bf16=150 * TERA,
        tf32=75 * TERA,
        fp32=37 * TERA,
        memory_bytes_per_s=696 * GIGA,
        link_bytes_per_s=112.5 * GIGA,
        source="NVIDIA A40 data sheet",
    ),
    Peak(
        name="A30",
        bf16=165 * TERA,
        tf32=82 * TERA,
        fp32=10.3 * TERA,
        memory_bytes_per_s=933 * GIGA,
        link_bytes_per_s=200 * GIGA,
        source="NVIDIA A30 data sheet",
    ),
    Peak(
        name="A10",
        bf16=125 * TERA,
        tf32=62.5 * TERA,
        fp32=31 * TERA,
        memory_bytes_per_s=600 * GIGA,
        link_bytes_per_s=64 * GIGA,
        source="NVIDIA A10 data sheet",
    ),
    Peak(
        name="L40S",
        bf16=362 * TERA,
        tf32=183 * TERA,
        fp32=91.6 * TERA,
        memory_bytes_per_s=864 * GIGA,
        link_bytes_per_s=64 * GIGA,
        source="NVIDIA L40S data sheet",
    ),
    Peak(
        name="L40",
        bf16=181 * TERA,
        tf32=90.5 * TERA,
        fp32=90.5 * TERA,
        memory_bytes_per_s=864 * GIGA,
        link_bytes_per_s=64 * GIGA,
        source="NVIDIA L40 data sheet",
    ),
    Peak(
        name="RTX 6000 Ada",
        bf16=364 * TERA,
        tf32=182 * TERA,
        fp32=91 * TERA,
        memory_bytes_per_s=960 * GIGA,
        link_bytes_per_s=64 * GIGA,
        source=_ADA,
    ),
    Peak(
        name="RTX 4090",
        bf16=165 * TERA,
        tf32=82.6 * TERA,
        fp32=82.6 * TERA,
        memory_bytes_per_s=1.008 * TERA,
        link_bytes_per_s=64 * GIGA,
        source=_ADA,
    ),
    Peak(
        name="RTX PRO 6000 Max Q",
        bf16=438 * TERA,
        tf32=219 * TERA,
        fp32=110 * TERA,
        memory_bytes_per_s=1.792 * TERA,
        link_bytes_per_s=128 * GIGA,
        source=_PRO_MAX_Q,
    ),
    Peak(
        name="RTX PRO 6000 Workstation",
        bf16=504 * TERA,
        tf32=252 * TERA,
        fp32=126 * TERA,
        memory_bytes_per_s=1.792 * TERA,
        link_bytes_per_s=128 * GIGA,
        source=_PRO,
    ),
    Peak(
        name="L4",
        bf16=121 * TERA,
        tf32=60 * TERA,
        fp32=30 * TERA,
        memory_bytes_per_s=300 * GIGA,
        link_bytes_per_s=64 * GIGA,
        source="NVIDIA L4 data sheet",
    ),
)


def matmul_format(precision: Literal["fp32", "bf16"], *, tf32: bool) -> NumberFormat:
    """Return the number format in which a GPU computes matmuls under these settings."""
    if precision == "bf16":
        return "bf16"
    return "tf32" if tf32 else "fp32"


def peak_flops_per_s(device_name: str, number_format: NumberFormat) -> float | None:
    """Return the dense peak of a device in a number format.

    Returns:
        The peak, or None as ``find_peak``.
    """
    peak = find_peak(device_name)
    return None if peak is None else float(getattr(peak, number_format))


def find_peak(device_name: str) -> Peak | None:
    """Return the peak rates of a device.

    Returns:
        The rates, or None if the device is not in the table, such as a part of a GPU
        (MIG).
    """
    words = set(device_name.replace("-", " ").split())
    if words & _PARTS:
        return None
    for peak in PEAKS:
        if words.issuperset(peak.name.split()):
            return peak
    return None
