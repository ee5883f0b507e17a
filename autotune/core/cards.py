"""GPUs by name: how much memory each kind has, so that a plan can be made for a card that is not here.

A card has three sizes. Sellers count decimal gigabytes; NVML counts what the driver manages; a CUDA process sees less,
because the driver keeps a part. What CUDA sees differs between drivers by up to a few hundred MiB: of the figures
found, the smallest is in the table, so that what fits by it fits. "Secondary source" means that somebody other than
NVIDIA printed what their machine said. None of these figures depends on sparsity.

A board's power limit is what it may take at most, and what dense work on it takes in the long run.
"""

import difflib
import re
from dataclasses import dataclass

from autotune.errors import BadInput

_MIB = 2**20
_GIB = 2**30
_GB = 10**9

RESERVE_BYTES = 512 * _MIB
"""Of a GPU's memory, what no default budget includes: kernels that are loaded when first launched and library handles
grow outside PyTorch's allocator, where no limit holds them, in steps that no trial has run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a figure comes from; ``date`` is the source's own, or when it was read where it has none."""

    text: str
    date: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One kind of GPU.

    ``name`` is NVML's; ``other_names`` are NVML's for the same memory on another board. ``total_bytes`` is what NVML
    calls total with ECC as delivered, ``cuda_total_bytes`` what torch calls ``total_memory``.
    """

    key: str
    name: str
    other_names: tuple[str, ...] = ()
    compute_capability: tuple[int, int]
    """By NVIDIA's table, https://developer.nvidia.com/cuda-gpus, read 2026-11-21."""
    total_bytes: int
    total_source: Source
    cuda_total_bytes: int | None
    cuda_total_source: Source | None
    marketed_bytes: int
    marketed_source: Source
    power_limit_w: int
    """The board's power limit as delivered, the highest where boards of this memory differ or it may be configured."""
    power_source: Source

    @property
    def usable_bytes(self) -> int:
        """Return the memory that a CUDA process sees."""
        return self.cuda_total_bytes or self.total_bytes

    @property
    def default_budget_bytes(self) -> int:
        """Return the memory budget of a rank that is not given one."""
        return self.usable_bytes - RESERVE_BYTES


_MODAL = Source(
    text="nvidia-smi on Modal's machines, https://thundergolfer.com/blog/nvidia-gpu-memory-capacity; secondary source",
    date="2025-01-23",
)
_SMI = Source(text="nvidia-smi outputs in many public repositories; secondary source", date="2026-11-21")
_TORCH = Source(text="torch's device properties printed in a public repository; secondary source", date="2026-11-21")
_NIM = Source(
    text="NVIDIA NIM 1.6.0, https://docs.nvidia.com/nim/large-language-models/1.6.0/supported-models.html",
    date="2026-11-21",
)
_READ = "2026-11-22"
_RESELLERS = Source(text="specifications that sellers print; secondary source", date=_READ)
_GH200 = Source(text="NVIDIA GH200 data sheet: HBM3 and HBM3e", date=_READ)
_TORCH_OF_96GB = Source(
    text="torch's out-of-memory messages of Hopper GPUs with 96 GB in public repositories, the smallest; secondary "
    "source",
    date=_READ,
)
_ANANDTECH = Source(text="AnandTech, NVIDIA announces H100 NVL; secondary source", date="2023-03-21")

CARDS = (
    Card(
        key="a100-40gb",
        name="NVIDIA A100-SXM4-40GB",
        other_names=("NVIDIA A100-PCIE-40GB",),
        compute_capability=(8, 0),
        total_bytes=40_960 * _MIB,
        total_source=_MODAL,
        cuda_total_bytes=42_298_834_944,
        cuda_total_source=Source(
            text="deviceQuery in https://github.com/bottlerocket-os/bottlerocket/pull/3873; secondary source",
            date="2026-11-21",
        ),
        marketed_bytes=40 * _GB,
        marketed_source=_MODAL,
        power_limit_w=400,
        power_source=Source(text="NVIDIA A100 data sheet, SXM4 (the PCIe board has 250 W)", date=_READ),
    ),
    Card(
        key="a100-80gb",
        name="NVIDIA A100-SXM4-80GB",
        other_names=("NVIDIA A100 80GB PCIe",),
        compute_capability=(8, 0),
        total_bytes=81_920 * _MIB,
        total_source=_MODAL,
        cuda_total_bytes=81_049 * _MIB,
        cuda_total_source=Source(
            text="PCIe board in https://github.com/ekondis/mixbench/issues/47; secondary source", date="2023-11-30"
        ),
        marketed_bytes=80 * _GB,
        marketed_source=_NIM,
        power_limit_w=400,
        power_source=Source(text="NVIDIA A100 data sheet, SXM4 (the PCIe board has 300 W)", date=_READ),
    ),
    Card(
        key="l40s-48gb",
        name="NVIDIA L40S",
        compute_capability=(8, 9),
        total_bytes=46_068 * _MIB,
        total_source=_MODAL,
        cuda_total_bytes=int(44.42 * _GIB),
        cuda_total_source=Source(
            text="torch's out-of-memory message, two decimals of GiB, in "
            "https://github.com/stepfun-ai/Step-Video-T2V/issues/8; secondary source",
            date="2025-02-17",
        ),
        marketed_bytes=48 * _GB,
        marketed_source=_NIM,
        power_limit_w=350,
        power_source=Source(text="NVIDIA L40S data sheet", date=_READ),
    ),
    Card(
        key="rtx-4090-24gb",
        name="NVIDIA GeForce RTX 4090",
        compute_capability=(8, 9),
        total_bytes=24_564 * _MIB,
        total_source=Source(
            text="nvidia-smi in https://github.com/RLinf/RLinf/issues/255; secondary source", date="2025-11-12"
        ),
        cuda_total_bytes=int(23.64 * _GIB),
        cuda_total_source=Source(
            text="torch's out-of-memory message, two decimals of GiB, in https://github.com/ali-vilab/VGen/issues/104; "
            "secondary source",
            date="2024-04-02",
        ),
        marketed_bytes=24 * _GB,
        marketed_source=_NIM,
        power_limit_w=450,
        power_source=Source(text="NVIDIA GeForce RTX 4090 specifications", date=_READ),
    ),
    Card(
        key="h100-sxm-80gb",
        name="NVIDIA H100 80GB HBM3",
        compute_capability=(9, 0),
        total_bytes=81_559 * _MIB,
        total_source=Source(
            text="nvidia-smi in https://github.com/NVIDIA/nccl/issues/1264; secondary source", date="2026-11-21"
        ),
        cuda_total_bytes=81_082 * _MIB,
        cuda_total_source=_TORCH,
        marketed_bytes=80 * _GB,
        marketed_source=_NIM,
        power_limit_w=700,
        power_source=Source(text="NVIDIA H100 data sheet, SXM", date=_READ),
    ),
    Card(
        key="h100-pcie-80gb",
        name="NVIDIA H100 PCIe",
        compute_capability=(9, 0),
        total_bytes=81_559 * _MIB,
        total_source=_SMI,
        cuda_total_bytes=81_008 * _MIB,
        cuda_total_source=_TORCH,
        marketed_bytes=80 * _GB,
        marketed_source=_ANANDTECH,
        power_limit_w=350,
        power_source=Source(text="NVIDIA H100 PCIe product brief PB-11133-001", date=_READ),
    ),
    Card(
        key="h100-nvl-94gb",
        name="NVIDIA H100 NVL",
        compute_capability=(9, 0),
        total_bytes=95_830 * _MIB,
        total_source=_SMI,
        cuda_total_bytes=93 * _GIB,
        cuda_total_source=Source(
            text="torch's out-of-memory message, two decimals of GiB, in https://github.com/ali-vilab/VACE/issues/56; "
            "secondary source",
            date="2025-05-16",
        ),
        marketed_bytes=94 * _GB,
        marketed_source=_ANANDTECH,
        power_limit_w=400,
        power_source=Source(text="NVIDIA H100 data sheet, NVL: 350 to 400 W", date=_READ),
    ),
    Card(
        # No board's own total was found; all Hopper GPUs with 96 GB that were show the same.
        key="h100-96gb",
        name="NVIDIA H100 96GB HBM3",
        compute_capability=(9, 0),
        total_bytes=97_871 * _MIB,
        total_source=Source(text="nvidia-smi outputs of NVIDIA H20 and GH200; secondary source", date=_READ),
        cuda_total_bytes=int(94.5 * _GIB),
        cuda_total_source=_TORCH_OF_96GB,
        marketed_bytes=96 * _GB,
        marketed_source=Source(
            text="device 2338, H100 SXM5 96GB, in https://pci-ids.ucw.cz; secondary source", date=_READ
        ),
        power_limit_w=700,
        power_source=Source(text="NVIDIA H100 data sheet, SXM, of the board with 80 GB", date=_READ),
    ),
    Card(
        key="h20-96gb",
        name="NVIDIA H20",
        compute_capability=(9, 0),
        total_bytes=97_871 * _MIB,
        total_source=_SMI,
        cuda_total_bytes=97_285 * _MIB,
        cuda_total_source=_TORCH,
        marketed_bytes=96 * _GB,
        marketed_source=_RESELLERS,
        power_limit_w=500,
        power_source=_SMI,
    ),
    Card(
        key="gh200-96gb",
        name="NVIDIA GH200 480GB",
        other_names=("NVIDIA GH200 120GB",),
        compute_capability=(9, 0),
        total_bytes=97_871 * _MIB,
        total_source=_SMI,
        cuda_total_bytes=int(94.5 * _GIB),
        cuda_total_source=_TORCH_OF_96GB,
        marketed_bytes=96 * _GB,
        marketed_source=_GH200,
        power_limit_w=900,
        power_source=_SMI,
    ),
    Card(
        key="gh200-144gb",
        name="NVIDIA GH200 144G HBM3e",
        compute_capability=(9, 0),
        total_bytes=146_831 * _MIB,
        total_source=_SMI,
        cuda_total_bytes=153_008_209_920,
        cuda_total_source=Source(
            text="the driver's cuDeviceTotalMem in a public repository's test; secondary source", date=_READ
        ),
        marketed_bytes=144 * _GB,
        marketed_source=_GH200,
        power_limit_w=900,
        power_source=_SMI,
    ),
    Card(
        key="h200-141gb",
        name="NVIDIA H200",
        other_names=("NVIDIA H200 NVL",),
        compute_capability=(9, 0),
        total_bytes=143_771 * _MIB,
        total_source=_MODAL,
        cuda_total_bytes=143_156 * _MIB,
        cuda_total_source=_TORCH,
        marketed_bytes=141 * _GB,
        marketed_source=_NIM,
        power_limit_w=700,
        power_source=Source(text="NVIDIA H200 data sheet, SXM (the NVL board has 600 W)", date=_READ),
    ),
    Card(
        key="b200-180gb",
        name="NVIDIA B200",
        compute_capability=(10, 0),
        total_bytes=183_359 * _MIB,
        total_source=_SMI,
        cuda_total_bytes=int(178.35 * _GIB),
        cuda_total_source=Source(
            text="device query, two decimals of GiB, in https://github.com/pytorch/ao/pull/4002; secondary source",
            date="2026-03-05",
        ),
        marketed_bytes=180 * _GB,
        marketed_source=Source(
            text="NVIDIA DGX B200 user guide, 1,440 GB in eight GPUs (chips are also announced with 192 GB), "
            "https://docs.nvidia.com/dgx/dgxb200-user-guide/introduction-to-dgxb200.html",
            date="2026-11-21",
        ),
        power_limit_w=1000,
        power_source=Source(text="NVIDIA Blackwell architecture brief, HGX B200", date=_READ),
    ),
)

_TOTAL_TOLERANCE = 0.08
"""GDDR shows a fifteenth more with ECC off, as ECC takes a sixteenth of it; older drivers leave out about 1 %."""


def find_card(name: str) -> Card:
    """The card of a key, of NVML's name, or of a beginning of a key that fits one card alone, such as ``h200``.

    Case, spaces, hyphens, underscores and a leading "NVIDIA" make no difference.

    Raises:
        BadInput: If no card is named so, or several are.
    """
    wanted = _plain(name)
    exact = [card for card in CARDS if wanted in {_plain(card.key), *_plain_names(card)}]
    fitting = exact or [card for card in CARDS if wanted in _beginnings(card.key)]
    if len(fitting) == 1:
        return fitting[0]
    keys = {_plain(card.key): card.key for card in CARDS}
    spelled = {head: card.key for card in CARDS for head in _beginnings(card.key)} | keys
    near = [spelled[match] for match in difflib.get_close_matches(wanted, spelled)]
    close = [card.key for card in fitting] or list(dict.fromkeys(near))
    hint = f"Did you mean {' or '.join(close)}? " if close else ""
    raise BadInput(
        f"{name!r} fits {len(fitting)} cards" if fitting else f"no card is called {name!r}",
        next_step=f"{hint}Known cards: {', '.join(keys.values())}.",
    )


def card_of(gpu_name: str, total_bytes: int) -> Card | None:
    """Which card a device is, by NVML's name and total; None for any other, as for a slice of one (MIG, vGPU).

    The total must be near the card's as well: a part of a GPU may carry the whole one's name.
    """
    wanted = _plain(gpu_name)
    for card in CARDS:
        near = abs(total_bytes - card.total_bytes) <= _TOTAL_TOLERANCE * card.total_bytes
        if near and wanted in _plain_names(card):
            return card
    return None


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]+", "", name.lower()).removeprefix("nvidia")


def _plain_names(card: Card) -> set[str]:
    return {_plain(name) for name in (card.name, *card.other_names)}


def _beginnings(key: str) -> set[str]:
    """A key's first words, from the one with the model's number on: ``rtx`` alone is a family."""
    words = key.split("-")
    heads = {"".join(words[:count]) for count in range(1, len(words))}
    return {head for head in heads if any(letter.isdigit() for letter in head)}
