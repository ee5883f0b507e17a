"""Every environment variable that the code reads, sets or records; one that nobody has explained is an error."""

import ast
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.reference.markdown import code, table

_ROOT = Path(__file__).parent.parent.parent
_INTRODUCTION = """\
# Environment variables

Written by `make figures`; a variable that the code names and this page does not fails the tests. An option of the
command line comes before its variable, a variable before the profile.

"""
_NAMED = re.compile(
    r"(AUTOTUNE|CUBLAS|CUDA|GLOO|HF|MKL|NCCL|OMP|PYTORCH|SLURM|SLURMD|TORCHELASTIC|TOKENIZERS|RAYON|MASTER)_[A-Z0-9_]+"
    r"|LD_PRELOAD|TMPDIR|(LOCAL_)?(RANK|WORLD_SIZE)"
)
_READ_BY_US, _READ_BY_OTHERS, _SET_BY_OTHERS, _SET_BY_US = (
    "Yours to set",
    "Part of what a trial is",
    "Set by SLURM or torchrun, and read",
    "Set for child processes",
)
_ABOUT = {
    _READ_BY_US: "",
    _READ_BY_OTHERS: "Libraries read these. Trials inherit them, and what a ledger holds is taken up again only by "
    "commands that have the same\nvalues; so it is for the variables of threads and interfaces above.\n\n",
    _SET_BY_OTHERS: "",
    _SET_BY_US: "",
}
_MEANINGS: Mapping[str, Mapping[str, str]] = {
    _READ_BY_US: {
        "AUTOTUNE_DATA": "Directory of the dataset, where `--data` is not given.",
        "AUTOTUNE_NUMA_BINDING": "`0` leaves ranks unbound; by default each keeps to its GPU's NUMA node.",
        "AUTOTUNE_SITE": "The cluster's site file, where `--slurm` names none.",
        "CUDA_DEVICE_ORDER": "How CUDA numbers GPUs. By default ranks and trials use `PCI_BUS_ID`, as NVML does.",
        "CUDA_VISIBLE_DEVICES": "GPUs that are used, by number or UUID; measuring and reading agree on them.",
        "NCCL_SOCKET_IFNAME": "Network interface of NCCL. A site file's `network.interface` sets both.",
        "GLOO_SOCKET_IFNAME": "Network interface of gloo. Jobs on several nodes take that of the address at which a "
        "node is reached, ranks that measure on one machine the loopback one.",
        "OMP_NUM_THREADS": "Threads of a process on a CPU. Local ranks get 1 each where it is not set.",
        "OMP_WAIT_POLICY": "What threads do that wait; training on a CPU says `PASSIVE` where it is not set.",
    },
    _READ_BY_OTHERS: {
        "CUBLAS_WORKSPACE_CONFIG": "cuBLAS's workspaces: they need memory.",
        "CUDA_LAUNCH_BLOCKING": "Makes every launch wait.",
        "CUDA_MODULE_LOADING": "When kernels are loaded: it changes the size of a context.",
        "LD_PRELOAD": "Another allocator, for instance.",
        "MKL_NUM_THREADS": "Threads of a process on a CPU.",
        "NCCL_ALGO": "Ring or tree.",
        "NCCL_BUFFSIZE": "NCCL's buffers: they need memory.",
        "NCCL_IB_DISABLE": "Keeps NCCL off InfiniBand and RoCE.",
        "NCCL_IB_HCA": "Which cards NCCL uses.",
        "NCCL_MAX_NCHANNELS": "NCCL's channels: they need memory and multiprocessors.",
        "NCCL_P2P_DISABLE": "Keeps NCCL off direct copies between GPUs.",
        "NCCL_PROTO": "NCCL's protocol.",
        "PYTORCH_ALLOC_CONF": "torch's caching allocator, `expandable_segments:True` for instance.",
        "PYTORCH_CUDA_ALLOC_CONF": "The same by its older name.",
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "Switches that allocator off.",
    },
    _SET_BY_OTHERS: {
        "LOCAL_RANK": "This process among those of its node.",
        "LOCAL_WORLD_SIZE": "How many these are.",
        "MASTER_ADDR": "Where ranks meet.",
        "MASTER_PORT": "Where ranks meet.",
        "RANK": "This process among all ranks.",
        "WORLD_SIZE": "How many ranks there are.",
        "TORCHELASTIC_RESTART_COUNT": "Whether torchrun has started the ranks again.",
        "TORCHELASTIC_RUN_ID": "Which torchrun it is.",
        "TORCHELASTIC_USE_AGENT_STORE": "Whether torchrun keeps the store by which a failing rank leaves word.",
        "SLURMD_NODENAME": "This node.",
        "SLURM_CPUS_ON_NODE": "Allotted processors.",
        "SLURM_CPUS_PER_TASK": "Allotted processors.",
        "SLURM_GPUS_ON_NODE": "GPUs of the job on this node.",
        "SLURM_GPUS_PER_NODE": "The same, as it was asked for.",
        "SLURM_JOB_END_TIME": "When the job ends: no trial begins that would not be over by then; training saves.",
        "SLURM_JOB_ID": "Whether this is a job, and which.",
        "SLURM_JOB_NUM_NODES": "Nodes of the job.",
        "SLURM_LOCALID": "This task among those of its node.",
        "SLURM_NNODES": "Nodes of the job, by its older name.",
        "SLURM_NTASKS": "Tasks of the job.",
        "SLURM_RESTART_COUNT": "Whether the job was requeued.",
        "SLURM_STEP_ID": "Tells steps of a job apart.",
    },
    _SET_BY_US: {
        "AUTOTUNE_STARTER": "Where a job's script looks for what a command in a container wants started.",
        "HF_HUB_OFFLINE": "`1` in trials: models are built from scratch, and nothing is downloaded.",
        "NCCL_DEBUG": "`INFO` where a network is measured: NCCL's log tells what carries the messages.",
        "NCCL_DEBUG_FILE": "Where that log goes.",
        "NCCL_DEBUG_SUBSYS": "What of it is written.",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "`1` in trials: whether there is CUDA is asked without using it.",
        "RAYON_NUM_THREADS": "`1` in workers of `data prepare`: each has one processor.",
        "TOKENIZERS_PARALLELISM": "`false` in workers and trials.",
    },
}


def page() -> str:
    """The variables by who sets them."""
    text = _INTRODUCTION
    for group, meanings in _MEANINGS.items():
        rows = [(code(name), meaning) for name, meaning in meanings.items()]
        text += f"## {group}\n\n{_ABOUT[group]}" + table(("variable", "meaning"), rows) + "\n"
    return text.rstrip("\n") + "\n"


def explained() -> frozenset[str]:
    """Variables that the page has."""
    return frozenset(name for meanings in _MEANINGS.values() for name in meanings)


def named_in_code() -> dict[str, Sequence[str]]:
    """Names of environment variables among the texts of the code, with the files that have them."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(path for room in ("autotune", "trainer") for path in (_ROOT / room).rglob("*.py")):
        texts = {
            node.value
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and _NAMED.fullmatch(node.value)
        }
        for name in sorted(texts):
            found[name].append(path.relative_to(_ROOT).as_posix())
    return dict(found)
