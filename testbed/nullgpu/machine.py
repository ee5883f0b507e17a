"""A machine with pretended GPUs, on which commands are run."""

import dataclasses
import os
import shutil
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from autotune.base.process import start_child
from autotune.machine.gpu_models import GpuModel, find_gpu_model
from autotune.memory.decide.overheads import COMMUNICATION_BYTES, CONTEXT_BYTES
from testbed.nullgpu.counts import Counts
from testbed.nullgpu.environment import ROOT, Environment
from trainer.formats.gpu_peaks import peak_flops_per_s

CUBLAS_NOT_INITIALIZED, CUBLAS_ALLOC_FAILED, CUBLAS_EXECUTION_FAILED = 1, 3, 13
CUDNN_ALLOC_FAILED, CUDNN_EXECUTION_FAILED = 4004, 5000
CUDA_OUT_OF_MEMORY, CUDA_LAUNCH_FAILURE = 2, 719
NCCL_CUDA_ERROR, NCCL_SYSTEM_ERROR, NCCL_REMOTE_ERROR = 1, 2, 6
NVML_NOT_SUPPORTED, NVML_NO_PERMISSION, NVML_DRIVER_NOT_LOADED = 3, 4, 9

MEASURING = frozenset({"probe", "workers", "network", "confirm", "baseline", "tune"})
"""Commands that are rejected on login nodes, which a machine with ``sbatch`` is taken
for."""

_MULTIPROCESSORS = {
    "a100-40gb": 108,
    "a100-80gb": 108,
    "l40s-48gb": 142,
    "rtx-4090-24gb": 128,
    "h100-sxm-80gb": 132,
    "h100-pcie-80gb": 114,
    "h100-nvl-94gb": 132,
    "h200-141gb": 132,
    "b200-180gb": 148,
}
"""By NVIDIA's architecture papers; some kernels size their temporaries by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Planned faults; field names are the stubs' settings."""

    faults: str = ""
    """``FUNCTION=ANSWER[@FIRST[-LAST]][<BYTES]``, with commas between: a number that a
    library's function returns, or ``hang``; from which call of a process to which; only
    while fewer bytes are free. ``kernel`` is any launch."""
    may_miss: bool = False
    """Whether a test may end without one of them."""
    absent: tuple[str, ...] = ()
    """NVML functions that this driver does not have."""
    growth_per_launch: int = 0
    """Bytes outside the allocator that each launch leaves behind."""
    growth_per_s: int = 0
    neighbour: int = 0
    """Bytes that another process (1) holds on every GPU, for a part of the time."""
    neighbour_from_s: float = 0.0
    neighbour_until_s: float = 1e9
    thermal_first: int = 0
    """NVML's sample from which on it says that the GPU is too hot."""
    thermal_samples: int = 0
    mig: str = ""
    """A profile such as ``1g.12gb``: the GPUs are in MIG mode, with one slice each."""
    mig_memory: int = 11 * 2**30
    collective_wait_s: float = 60.0
    """A collective whose peer lives and does not come is given up; if the peer is dead,
    at once."""


NO_FAULTS = Faults()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Exit code, output and counts of a command."""

    code: int
    out: str
    err: str
    counts: Counts

    def __str__(self) -> str:
        return f"exit code {self.code}\n{self.out[-3000:]}\n{self.err[-5000:]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Pretended GPUs, all alike, that the commands run on it share.

    Args:
        environment: Python, torch and the stubs.
        folder: Folder with the memory in use and the counts, one for each machine.
        name: A GPU of the project's table.
        memory: Bytes that CUDA counts, if not the GPU's own.
    """

    environment: Environment
    folder: Path
    devices: int = 1
    name: str = "h100-nvl-94gb"
    memory: int | None = None
    driver: str = ""
    """Version that NVML states instead of its own, by which the project knows that
    nothing here may be kept as measured: for what must be run to its end all the same,
    and is thrown away. Matrix products and collectives take time then."""
    faults: Faults = NO_FAULTS
    values: bool = False
    """Whether ranks of torchrun compute; collectives exchange data only then."""
    variables: dict[str, str] = field(default_factory=dict)

    def autotune(self, *words: str | Path, timeout_s: float = 300) -> Ended:
        """Run ``autotune``; it measures here although SLURM may be installed."""
        options = ("--here",) if words[0] in MEASURING else ()
        return self.run("-m", "autotune", *words, *options, timeout_s=timeout_s)

    def torchrun(
        self, *words: str | Path, ranks: int | None = None, timeout_s: float = 300
    ) -> Ended:
        """Run a script or ``-m`` module on as many ranks as there are devices.

        With ``ranks``, it runs on that number of ranks.
        """
        launch = (
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks or self.devices}",
        )
        return self.run(*launch, *words, timeout_s=timeout_s)

    def run(self, *words: str | Path, timeout_s: float = 300) -> Ended:
        """Run Python, with everything that it starts ended after so many seconds."""
        with self.start(*words) as process:
            try:
                out, err = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired as late:
                os.killpg(process.pid, signal.SIGKILL)
                out, err = process.communicate()
                raise TimeoutError(
                    f"{' '.join(map(str, words))} took over {timeout_s}"
                    f" s:\n{out[-3000:]}{err[-3000:]}"
                ) from late
        return Ended(code=process.returncode, out=out, err=err, counts=self.counts())

    def counts(self) -> Counts:
        """Return what was counted since counting began anew."""
        return Counts.read(self._counts.glob("*"))

    def missed(self) -> list[str]:
        """Return the planned faults that the last command did not meet.

        There are none if it may miss faults.
        """
        planned = (
            []
            if self.faults.may_miss
            else [plan for plan in self.faults.faults.split(",") if plan]
        )
        return [plan for plan in planned if not self.counts()["fault", plan]]

    def start(self, *words: str | Path) -> subprocess.Popen[str]:
        """Start Python in its own session; counting begins anew."""
        shutil.rmtree(self._counts, ignore_errors=True)
        return start_child(
            [str(word) for word in (self.environment.python, *words)],
            env=self.variables_of_commands(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            start_new_session=True,
        )

    def variables_of_commands(self) -> dict[str, str]:
        """Return the environment that makes a Python see these GPUs.

        The Python is of the second environment.
        """
        gpu_model = find_gpu_model(self.name)
        memory = gpu_model.usable_bytes
        overridden = {
            "CUDA_VISIBLE_DEVICES",
            "CUDA_DEVICE_ORDER",
            "PYTORCH_ALLOC_CONF",
            "PYTORCH_CUDA_ALLOC_CONF",
        }
        inherited = {
            key: value
            for key, value in os.environ.items()
            if key not in overridden and not key.startswith("NULLGPU_")
        }
        stubs = (
            [self._without_absent(), self.environment.stubs]
            if self.faults.absent
            else [self.environment.stubs]
        )
        start = [ROOT / "testbed/nullgpu/start"] if self.values else []
        settings = {
            name: value
            for name, value in dataclasses.asdict(self.faults).items()
            if value and name not in ("absent", "may_miss")
        }
        settings |= {
            "cards": self.devices,
            "memory": self.memory or memory,
            "reserved": gpu_model.total_bytes - memory,
            "name": gpu_model.name,
            **(self._rates() | {"driver": self.driver} if self.driver else {}),
            "capability": "{}.{}".format(*gpu_model.compute_capability),
            "multiprocessors": _MULTIPROCESSORS[gpu_model.key],
            "context": CONTEXT_BYTES.usual,
            "communicator": COMMUNICATION_BYTES.usual,
            "state": self.folder / "state",
            "counts": self._counts,
            "values": int(self.values),
        }
        return {
            **inherited,
            **{
                f"NULLGPU_{name.upper()}": str(value)
                for name, value in settings.items()
            },
            "LD_LIBRARY_PATH": os.pathsep.join(map(str, stubs)),
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, *start))),
            "TRITON_LIBCUDA_PATH": str(self.environment.stubs),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            **self.variables,
        }

    def _rates(self) -> dict[str, float]:
        """Return rates that this GPU could have.

        They are of matmuls in any format, and of a collective over PCIe.
        """
        peaks = [
            peak_flops_per_s(find_gpu_model(self.name).name, dtype)
            for dtype in ("bf16", "tf32")
        ]
        return {
            "flops_per_s": 0.9 * min(peak for peak in peaks if peak is not None),
            "link_bytes_per_s": 20e9,
        }

    @property
    def _counts(self) -> Path:
        return self.folder / "counts"

    def _without_absent(self) -> Path:
        """Return a folder with an NVML in which some functions cannot be found."""
        library = "libnvidia-ml.so.1"
        content = (self.environment.stubs / library).read_bytes()
        for name in self.faults.absent:
            symbol = b"\0" + name.encode() + b"\0"
            assert symbol in content, name
            # Its hash does not fit the new name either.
            content = content.replace(symbol, symbol[:-2] + b"?\0")
        folder = self.folder / "absent"
        folder.mkdir(exist_ok=True)
        (folder / library).write_bytes(content)
        return folder


def cards() -> dict[str, GpuModel]:
    """Return the GPUs that can be pretended, by the project's names."""
    return {name: find_gpu_model(name) for name in _MULTIPROCESSORS}
