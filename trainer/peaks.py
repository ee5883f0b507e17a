"""Floating-point operations: what a training step has to compute, and what GPUs can do at most. No torch here.

Counted of a step is what the mathematics asks for: matrix products of the layers for real tokens, attention within
documents, the head at the tokens to predict, each once forward and twice backward. Not counted: padding, recomputation,
the look-up of embeddings, normalisation, softmax, the optimizer. The other common count, six times all parameters for
each real token, is given beside it.

Peaks are those of dense matrix products, memory and links, by the makers' data sheets, most of which print figures with
structured sparsity; dense is half of that. Read in 2026.
"""

from dataclasses import dataclass
from typing import Literal

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

        ``lengths``, shape (N,), are the real tokens of each document.
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


Format = Literal["bf16", "tf32", "fp32"]

TERA = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """One kind of GPU."""

    name: str
    """Words of its driver's name; the first row whose words all occur counts."""
    bf16: float
    """FLOP/s, dense."""
    tf32: float
    fp32: float
    """Without matrix units."""
    source: str


_ADA = "NVIDIA Ada architecture white paper; sums in fp32"
_PRO = "NVIDIA RTX Blackwell PRO architecture white paper"
_PRO_MAX_Q = "NVIDIA RTX PRO 6000 Max-Q data sheet: an 8th of 3,511 AI TOPS, which are sparse fp4"
_PARTS = {"MIG", "Laptop", "D"}
"""Words that name a part of a GPU, or one that is less than what has the name without them."""

# Left out, as no data sheet with a dense figure was found: A10G, of which others print 62.5, 70 and 125 TFLOP/s in
# bf16; RTX PRO 6000 Server Edition, which has the chip of the others, and clocks and power of its own.
PEAKS = (
    Peak(name="H100 NVL", bf16=835 * TERA, tf32=417 * TERA, fp32=60 * TERA, source="NVIDIA H100 data sheet, NVL"),
    Peak(name="H100 PCIe", bf16=756 * TERA, tf32=378 * TERA, fp32=51 * TERA, source="NVIDIA H100 data sheet, PCIe"),
    Peak(name="H100", bf16=989 * TERA, tf32=494 * TERA, fp32=67 * TERA, source="NVIDIA H100 data sheet, SXM"),
    Peak(name="H200 NVL", bf16=835 * TERA, tf32=417 * TERA, fp32=60 * TERA, source="NVIDIA H200 data sheet, NVL"),
    Peak(name="H200", bf16=989 * TERA, tf32=494 * TERA, fp32=67 * TERA, source="NVIDIA H200 data sheet, SXM"),
    Peak(name="GH200", bf16=989 * TERA, tf32=494 * TERA, fp32=67 * TERA, source="NVIDIA GH200 data sheet"),
    Peak(name="H800 PCIe", bf16=756 * TERA, tf32=378 * TERA, fp32=51 * TERA, source="NVIDIA H800 data sheet, PCIe"),
    Peak(name="H800", bf16=989 * TERA, tf32=494 * TERA, fp32=67 * TERA, source="NVIDIA H800 data sheet, SXM"),
    Peak(name="H20", bf16=148 * TERA, tf32=74 * TERA, fp32=44 * TERA, source="specifications that sellers print"),
    Peak(name="B200", bf16=2250 * TERA, tf32=1100 * TERA, fp32=75 * TERA, source="NVIDIA HGX B200 data sheet"),
    Peak(name="GB200", bf16=2500 * TERA, tf32=1250 * TERA, fp32=80 * TERA, source="a 72nd of NVIDIA GB200 NVL72's"),
    Peak(name="B300", bf16=2250 * TERA, tf32=1125 * TERA, fp32=75 * TERA, source="an 8th of NVIDIA HGX B300's"),
    Peak(name="GB300", bf16=2500 * TERA, tf32=1250 * TERA, fp32=80 * TERA, source="a 72nd of NVIDIA GB300 NVL72's"),
    Peak(name="A100", bf16=312 * TERA, tf32=156 * TERA, fp32=19.5 * TERA, source="NVIDIA A100 data sheet"),
    Peak(name="A800", bf16=312 * TERA, tf32=156 * TERA, fp32=19.5 * TERA, source="NVIDIA A800 data sheet"),
    Peak(name="A40", bf16=150 * TERA, tf32=75 * TERA, fp32=37 * TERA, source="NVIDIA A40 data sheet"),
    Peak(name="A30", bf16=165 * TERA, tf32=82 * TERA, fp32=10.3 * TERA, source="NVIDIA A30 data sheet"),
    Peak(name="A10", bf16=125 * TERA, tf32=62.5 * TERA, fp32=31 * TERA, source="NVIDIA A10 data sheet"),
    Peak(name="L40S", bf16=362 * TERA, tf32=183 * TERA, fp32=91.6 * TERA, source="NVIDIA L40S data sheet"),
    Peak(name="L40", bf16=181 * TERA, tf32=90.5 * TERA, fp32=90.5 * TERA, source="NVIDIA L40 data sheet"),
    Peak(name="RTX 6000 Ada", bf16=364 * TERA, tf32=182 * TERA, fp32=91 * TERA, source=_ADA),
    Peak(name="RTX 4090", bf16=165 * TERA, tf32=82.6 * TERA, fp32=82.6 * TERA, source=_ADA),
    Peak(name="RTX PRO 6000 Max Q", bf16=438 * TERA, tf32=219 * TERA, fp32=110 * TERA, source=_PRO_MAX_Q),
    Peak(name="RTX PRO 6000 Workstation", bf16=504 * TERA, tf32=252 * TERA, fp32=126 * TERA, source=_PRO),
    Peak(name="L4", bf16=121 * TERA, tf32=60 * TERA, fp32=30 * TERA, source="NVIDIA L4 data sheet"),
)

LINK_BYTES_PER_S = {
    "H100 NVL": 600e9, "H100 PCIe": 600e9, "H100": 900e9, "H200 NVL": 900e9, "H200": 900e9, "GH200": 900e9,
    "H800 PCIe": 400e9, "H800": 400e9, "H20": 900e9, "B200": 1800e9, "GB200": 1800e9, "B300": 1800e9, "GB300": 1800e9,
    "A100": 600e9, "A800": 400e9, "A40": 112.5e9, "A30": 200e9, "A10": 64e9, "L40S": 64e9, "L40": 64e9,
    "RTX 6000 Ada": 64e9, "RTX 4090": 64e9, "RTX PRO 6000 Max Q": 128e9, "RTX PRO 6000 Workstation": 128e9, "L4": 64e9,
}  # fmt: skip
"""All links of a GPU, both directions together: NVLink, or 16 lanes of PCIe without it. Not yet checked against data
sheets; they only bound what is plausible."""


def product_format(precision: Literal["fp32", "bf16"], *, tf32: bool) -> Format:
    """What a GPU's matrix products are computed in, under such settings."""
    return "bf16" if precision == "bf16" else "tf32" if tf32 else "fp32"


def peak_flops_per_s(device_name: str, number_format: Format) -> float | None:
    """Return the dense peak of a device, or None if the table does not know it, such as a part of one (MIG)."""
    found = _peak(device_name)
    return None if found is None else float(getattr(found, number_format))


def peak_link_bytes_per_s(device_name: str) -> float | None:
    """Return the bandwidth of a device's links, both directions together, or None if the table does not know it."""
    found = _peak(device_name)
    return None if found is None else LINK_BYTES_PER_S.get(found.name)


def _peak(device_name: str) -> Peak | None:
    words = set(device_name.replace("-", " ").split())
    if words & _PARTS:
        return None
    return next((peak for peak in PEAKS if words.issuperset(peak.name.split())), None)
