"""Peak rates of GPUs, from data sheets. No torch here.

Peaks are those of dense matmuls and of links, from the vendors' data sheets, most of
which print figures with structured sparsity; dense is half of that. Read in 2026.
"""

from dataclasses import dataclass
from typing import Literal

NumberFormat = Literal["bf16", "tf32", "fp32"]
GIGA = 1e9
TERA = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Peak rates of one GPU model."""

    name: str
    """Words of the GPU's name in its driver; the first row of the table whose words all
    occur matches."""
    bf16_flops_per_s: float
    """Dense rate in FLOP/s."""
    tf32_flops_per_s: float
    """Dense rate in FLOP/s."""
    fp32_flops_per_s: float
    """Rate in FLOP/s without Tensor Cores."""
    has_fp8: bool = True
    """True if Tensor Cores compute in float8: since Ada."""
    memory_bytes_per_s: float
    """Bandwidth of GPU memory."""
    link_bytes_per_s: float
    """Bandwidth of all links in both directions: NVLink, or else 16 lanes of PCIe. Not
    checked against data sheets; it only bounds plausible measurements."""
    source: str
    """Origin of the dense rates and of the memory bandwidth."""

    @property
    def fp8_flops_per_s(self) -> float | None:
        """Dense float8 rate in FLOP/s, twice bf16's on every data sheet with float8.

        None for GPUs without it.
        """
        return 2 * self.bf16_flops_per_s if self.has_fp8 else None

    def matmul_flops_per_s(self, number_format: NumberFormat) -> float:
        """Return the dense rate of matmuls in a number format."""
        match number_format:
            case "bf16":
                return self.bf16_flops_per_s
            case "tf32":
                return self.tf32_flops_per_s
            case "fp32":
                return self.fp32_flops_per_s


_WORDS_OF_LESSER_GPUS = frozenset({"MIG", "Laptop", "D"})
"""Words in the name of a part of a GPU (MIG), or of a GPU with lower peaks than the one
without the word: laptop GPUs, and the RTX 4090 D."""

_ADA = "NVIDIA Ada architecture white paper; sums in fp32"
_PRO = "NVIDIA RTX Blackwell PRO architecture white paper"
_PRO_MAX_Q = (
    "NVIDIA RTX PRO 6000 Max-Q data sheet: an 8th of 3,511 AI TOPS, which are"
    " sparse fp4"
)

# Left out for lack of a data sheet with a dense figure: A10G (sources say 62.5, 70 and
# 125 TFLOP/s in bf16), and RTX PRO 6000 Server Edition (same chip, other clocks and
# power).
PEAKS = (
    Peak(
        name="H100 NVL",
        bf16_flops_per_s=835 * TERA,
        tf32_flops_per_s=417 * TERA,
        fp32_flops_per_s=60 * TERA,
        memory_bytes_per_s=3.9 * TERA,
        link_bytes_per_s=600 * GIGA,
        source="NVIDIA H100 data sheet, NVL",
    ),
    Peak(
        name="H100 PCIe",
        bf16_flops_per_s=756 * TERA,
        tf32_flops_per_s=378 * TERA,
        fp32_flops_per_s=51 * TERA,
        memory_bytes_per_s=2 * TERA,
        link_bytes_per_s=600 * GIGA,
        source="NVIDIA H100 data sheet, PCIe",
    ),
    Peak(
        name="H100",
        bf16_flops_per_s=989 * TERA,
        tf32_flops_per_s=494 * TERA,
        fp32_flops_per_s=67 * TERA,
        memory_bytes_per_s=3.35 * TERA,
        link_bytes_per_s=900 * GIGA,
        source="NVIDIA H100 data sheet, SXM",
    ),
    Peak(
        name="H200 NVL",
        bf16_flops_per_s=835 * TERA,
        tf32_flops_per_s=417 * TERA,
        fp32_flops_per_s=60 * TERA,
        memory_bytes_per_s=4.8 * TERA,
        link_bytes_per_s=900 * GIGA,
        source="NVIDIA H200 data sheet, NVL",
    ),
    Peak(
        name="H200",
        bf16_flops_per_s=989 * TERA,
        tf32_flops_per_s=494 * TERA,
        fp32_flops_per_s=67 * TERA,
        memory_bytes_per_s=4.8 * TERA,
        link_bytes_per_s=900 * GIGA,
        source="NVIDIA H200 data sheet, SXM",
    ),
    Peak(
        name="GH200",
        bf16_flops_per_s=989 * TERA,
        tf32_flops_per_s=494 * TERA,
        fp32_flops_per_s=67 * TERA,
        memory_bytes_per_s=4 * TERA,
        link_bytes_per_s=900 * GIGA,
        source="NVIDIA GH200 data sheet",
    ),
    Peak(
        name="H800 PCIe",
        bf16_flops_per_s=756 * TERA,
        tf32_flops_per_s=378 * TERA,
        fp32_flops_per_s=51 * TERA,
        memory_bytes_per_s=2 * TERA,
        link_bytes_per_s=400 * GIGA,
        source="NVIDIA H800 data sheet, PCIe",
    ),
    Peak(
        name="H800",
        bf16_flops_per_s=989 * TERA,
        tf32_flops_per_s=494 * TERA,
        fp32_flops_per_s=67 * TERA,
        memory_bytes_per_s=3.35 * TERA,
        link_bytes_per_s=400 * GIGA,
        source="NVIDIA H800 data sheet, SXM",
    ),
    Peak(
        name="H20",
        bf16_flops_per_s=148 * TERA,
        tf32_flops_per_s=74 * TERA,
        fp32_flops_per_s=44 * TERA,
        memory_bytes_per_s=4 * TERA,
        link_bytes_per_s=900 * GIGA,
        source="specifications that sellers print",
    ),
    Peak(
        name="B200",
        bf16_flops_per_s=2250 * TERA,
        tf32_flops_per_s=1100 * TERA,
        fp32_flops_per_s=75 * TERA,
        memory_bytes_per_s=8 * TERA,
        link_bytes_per_s=1800 * GIGA,
        source="NVIDIA HGX B200 data sheet",
    ),
    Peak(
        name="GB200",
        bf16_flops_per_s=2500 * TERA,
        tf32_flops_per_s=1250 * TERA,
        fp32_flops_per_s=80 * TERA,
        memory_bytes_per_s=8 * TERA,
        link_bytes_per_s=1800 * GIGA,
        source="a 72nd of NVIDIA GB200 NVL72's",
    ),
    Peak(
        name="B300",
        bf16_flops_per_s=2250 * TERA,
        tf32_flops_per_s=1125 * TERA,
        fp32_flops_per_s=75 * TERA,
        memory_bytes_per_s=8 * TERA,
        link_bytes_per_s=1800 * GIGA,
        source="an 8th of NVIDIA HGX B300's",
    ),
    Peak(
        name="GB300",
        bf16_flops_per_s=2500 * TERA,
        tf32_flops_per_s=1250 * TERA,
        fp32_flops_per_s=80 * TERA,
        memory_bytes_per_s=8 * TERA,
        link_bytes_per_s=1800 * GIGA,
        source="a 72nd of NVIDIA GB300 NVL72's",
    ),
    Peak(
        name="A100 40GB",
        bf16_flops_per_s=312 * TERA,
        tf32_flops_per_s=156 * TERA,
        fp32_flops_per_s=19.5 * TERA,
        has_fp8=False,
        memory_bytes_per_s=1.555 * TERA,
        link_bytes_per_s=600 * GIGA,
        source="NVIDIA A100 data sheet",
    ),
    Peak(
        name="A100",
        bf16_flops_per_s=312 * TERA,
        tf32_flops_per_s=156 * TERA,
        fp32_flops_per_s=19.5 * TERA,
        has_fp8=False,
        memory_bytes_per_s=2.039 * TERA,
        link_bytes_per_s=600 * GIGA,
        source="NVIDIA A100 data sheet",
    ),
    Peak(
        name="A800",
        bf16_flops_per_s=312 * TERA,
        tf32_flops_per_s=156 * TERA,
        fp32_flops_per_s=19.5 * TERA,
        has_fp8=False,
        memory_bytes_per_s=2.039 * TERA,
        link_bytes_per_s=400 * GIGA,
        source="NVIDIA A800 data sheet",
    ),
    Peak(
        name="A40",
        bf16_flops_per_s=150 * TERA,
        tf32_flops_per_s=75 * TERA,
        fp32_flops_per_s=37 * TERA,
        has_fp8=False,
        memory_bytes_per_s=696 * GIGA,
        link_bytes_per_s=112.5 * GIGA,
        source="NVIDIA A40 data sheet",
    ),
    Peak(
        name="A30",
        bf16_flops_per_s=165 * TERA,
        tf32_flops_per_s=82 * TERA,
        fp32_flops_per_s=10.3 * TERA,
        has_fp8=False,
        memory_bytes_per_s=933 * GIGA,
        link_bytes_per_s=200 * GIGA,
        source="NVIDIA A30 data sheet",
    ),
    Peak(
        name="A10",
        bf16_flops_per_s=125 * TERA,
        tf32_flops_per_s=62.5 * TERA,
        fp32_flops_per_s=31 * TERA,
        has_fp8=False,
        memory_bytes_per_s=600 * GIGA,
        link_bytes_per_s=64 * GIGA,
        source="NVIDIA A10 data sheet",
    ),
    Peak(
        name="L40S",
        bf16_flops_per_s=362 * TERA,
        tf32_flops_per_s=183 * TERA,
        fp32_flops_per_s=91.6 * TERA,
        memory_bytes_per_s=864 * GIGA,
        link_bytes_per_s=64 * GIGA,
        source="NVIDIA L40S data sheet",
    ),
    Peak(
        name="L40",
        bf16_flops_per_s=181 * TERA,
        tf32_flops_per_s=90.5 * TERA,
        fp32_flops_per_s=90.5 * TERA,
        memory_bytes_per_s=864 * GIGA,
        link_bytes_per_s=64 * GIGA,
        source="NVIDIA L40 data sheet",
    ),
    Peak(
        name="RTX 6000 Ada",
        bf16_flops_per_s=364 * TERA,
        tf32_flops_per_s=182 * TERA,
        fp32_flops_per_s=91 * TERA,
        memory_bytes_per_s=960 * GIGA,
        link_bytes_per_s=64 * GIGA,
        source=_ADA,
    ),
    Peak(
        name="RTX 4090",
        bf16_flops_per_s=165 * TERA,
        tf32_flops_per_s=82.6 * TERA,
        fp32_flops_per_s=82.6 * TERA,
        memory_bytes_per_s=1.008 * TERA,
        link_bytes_per_s=64 * GIGA,
        source=_ADA,
    ),
    Peak(
        name="RTX PRO 6000 Max Q",
        bf16_flops_per_s=438 * TERA,
        tf32_flops_per_s=219 * TERA,
        fp32_flops_per_s=110 * TERA,
        memory_bytes_per_s=1.792 * TERA,
        link_bytes_per_s=128 * GIGA,
        source=_PRO_MAX_Q,
    ),
    Peak(
        name="RTX PRO 6000 Workstation",
        bf16_flops_per_s=504 * TERA,
        tf32_flops_per_s=252 * TERA,
        fp32_flops_per_s=126 * TERA,
        memory_bytes_per_s=1.792 * TERA,
        link_bytes_per_s=128 * GIGA,
        source=_PRO,
    ),
    Peak(
        name="L4",
        bf16_flops_per_s=121 * TERA,
        tf32_flops_per_s=60 * TERA,
        fp32_flops_per_s=30 * TERA,
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
        The peak, or None if ``find_peak`` does not know the device.
    """
    peak = find_peak(device_name)
    if peak is None:
        return None
    return peak.matmul_flops_per_s(number_format)


def find_peak(device_name: str) -> Peak | None:
    """Return the peak rates of a device.

    Returns:
        The rates, or None if the device is not in the table, such as a part of a GPU
        (MIG).
    """
    words = set(device_name.replace("-", " ").split())
    if words & _WORDS_OF_LESSER_GPUS:
        return None
    for peak in PEAKS:
        if words.issuperset(peak.name.split()):
            return peak
    return None
