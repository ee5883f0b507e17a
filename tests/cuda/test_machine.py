"""The pretended machine itself: memory, processes, counts and every fault."""

import json
import selectors
import signal
import subprocess

import pytest

from testbed.nullgpu.machine import (
    CUBLAS_ALLOC_FAILED,
    CUDA_LAUNCH_FAILURE,
    CUDA_OUT_OF_MEMORY,
    CUDNN_ALLOC_FAILED,
    Faults,
    cards,
)

pytestmark = pytest.mark.cuda
GIB = 2**30

# Without torch, whose import takes seconds.
CUDART = """
import ctypes, time
cuda = ctypes.CDLL("libcudart.so.13")
class Dim3(ctypes.Structure): _fields_ = [(axis, ctypes.c_uint) for axis in "xyz"]
one = Dim3(1, 1, 1)
cuda.cudaLaunchKernel.argtypes = (ctypes.c_void_p, Dim3, Dim3, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
def launch(): return cuda.cudaLaunchKernel(ctypes.cast(cuda.cudaMalloc, ctypes.c_void_p), one, one, None, 0, None)
def memory():
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    cuda.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value
"""
NVML = """
import pynvml
pynvml.nvmlInit()
card = pynvml.nvmlDeviceGetHandleByIndex(0)
"""


@pytest.mark.parametrize("name", cards())
def test_gpu_has_the_memory_of_its_kind(null_gpu, name):
    program = (
        "print(pynvml.nvmlDeviceGetName(card), memory()[1],"
        " pynvml.nvmlDeviceGetMemoryInfo(card).total, sep='|')"
    )
    ended = null_gpu(name=name).run("-c", CUDART + NVML + program)
    gpu_model = cards()[name]
    assert ended.out.strip().split("|") == [
        gpu_model.name,
        str(gpu_model.usable_bytes),
        str(gpu_model.total_bytes),
    ], ended


@pytest.mark.parametrize(
    "name", ["a100-80gb", "l40s-48gb", "h100-nvl-94gb", "b200-180gb"]
)
def test_kernels_of_every_generation_run(null_gpu, name):
    program = (
        "import torch; print(torch.ones(10_000,"
        " device='cuda').cumsum(0).sort().values.shape[0])"
    )
    ended = null_gpu(name=name).run("-c", program)
    assert ended.out == "10000\n", ended


BYTES = """
import json, torch
from autotune.memory.decide.memory_model import CONTEXT_BYTES
def used(): return pynvml.nvmlDeviceGetMemoryInfo(card).used
before = used()
torch.zeros(1, device="cuda")
context = used() - before - 2 * 2**20  # one small segment
kept = torch.zeros(2**30, dtype=torch.uint8, device="cuda")
try:
    torch.empty(100 * 2**30, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    text = str(error)
print(json.dumps({"context": context, "assumed": CONTEXT_BYTES.usual, "reserved": torch.cuda.memory_reserved(),
    "text": text, "driver": pynvml.nvmlSystemGetDriverVersion(),
    "pids": [p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(card)]}))
"""


def test_memory_is_accounted_for_as_assumed(
    null_gpu,
):
    ended = null_gpu(faults=Faults(neighbour=GIB)).run("-c", NVML + BYTES)
    found = json.loads(ended.out)
    assert found["context"] == found["assumed"]
    assert found["reserved"] == GIB
    assert "CUDA out of memory. Tried to allocate 100.00 GiB" in found["text"]
    assert found["driver"] == "0.0 (nullgpu)"
    assert 1 in found["pids"]
    assert "Warning" not in ended.err, ended


MATMUL = "x = torch.ones(64, 64, device='cuda'); x @ x"
CUDNN = (
    "torch.nn.functional.conv2d(torch.ones(1, 3, 8, 8, device='cuda'), torch.ones(4, 3,"
    " 3, 3, device='cuda'))"
)
WHEN_SHORT = f"cublasCreate_v2={CUBLAS_ALLOC_FAILED}<{2 * GIB}"
FILL = (
    f"rest = torch.cuda.mem_get_info()[0] - {GIB}; y = torch.empty(rest,"
    " dtype=torch.uint8, device='cuda'); "
)


@pytest.mark.parametrize(
    ("faults", "program", "said"),
    [
        (WHEN_SHORT, f"{MATMUL}; print('fits')", "fits"),
        (
            WHEN_SHORT,
            f"torch.cuda.init(); {FILL}{MATMUL}",
            "CUBLAS_STATUS_ALLOC_FAILED",
        ),
        (
            f"cudnnCreate={CUDNN_ALLOC_FAILED}",
            CUDNN,
            "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        ),
        (
            f"kernel={CUDA_LAUNCH_FAILURE}@3",
            "[torch.ones(8, device='cuda') for _ in range(3)]",
            "unspecified launch failure",
        ),
        (
            f"cudaHostAlloc={CUDA_OUT_OF_MEMORY}",
            "torch.ones(8).pin_memory()",
            "out of memory",
        ),
        (
            f"cudaEventSynchronize={CUDA_LAUNCH_FAILURE}",
            "event = torch.cuda.Event(); event.record(); event.synchronize()",
            "unspecified launch failure",
        ),
        (
            f"cudaSetDevice={CUDA_LAUNCH_FAILURE}@2",
            "torch.ones(8, device='cuda:1')",
            "unspecified launch failure",
        ),
    ],
)
def test_libraries_fail_on_purpose(null_gpu, faults, program, said):
    planned = Faults(faults=faults, may_miss=said == "fits")
    ended = null_gpu(devices=2, faults=planned).run("-c", f"import torch; {program}")
    assert said in ended.out + ended.err, ended


def test_missed_faults_are_found(null_gpus):
    _, *missed = planned = ("cudaMemGetInfo=2", "cudaMemGetInfo=2@2", "cudaMemInfo=2")
    machine = null_gpus(faults=Faults(faults=",".join(planned)))
    assert machine.run("-c", f"{CUDART}memory()").code == 0
    assert machine.missed() == missed


def test_nvml_functions_can_be_absent(
    null_gpu,
):
    absent = (
        "nvmlDeviceGetHandleByIndex_v2",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetIndex",
    )
    program = """
import pynvml
pynvml.nvmlInit()
card = pynvml.nvmlDeviceGetHandleByUUID("GPU-6e756c6c-6770-7500-0000-000000000000")
print(*(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(card) for _ in range(4)))
print(pynvml.nvmlDeviceGetMinorNumber(card))
pynvml.nvmlDeviceGetIndex(card)
"""
    ended = null_gpu(
        faults=Faults(absent=absent, thermal_first=1, thermal_samples=2)
    ).run("-c", program)
    assert ended.out == "0 64 64 0\n0\n", ended
    assert "Function Not Found" in ended.err, ended


def test_cuda_sees_only_the_mig_slice(null_gpu):
    program = (
        "import torch; p = torch.cuda.get_device_properties(0); part ="
        " pynvml.nvmlDeviceGetMigDeviceHandleByIndex(card, 0); print(p.name,"
        " p.total_memory, pynvml.nvmlDeviceGetName(card),"
        " pynvml.nvmlDeviceGetUUID(part)[:4], sep='|')"
    )
    ended = null_gpu(faults=Faults(mig="1g.12gb", mig_memory=11 * GIB)).run(
        "-c", NVML + program
    )
    assert (
        ended.out == f"NVIDIA H100 NVL MIG 1g.12gb|{11 * GIB}|NVIDIA H100 NVL|MIG-\n"
    ), ended


def test_non_pytorch_memory_can_grow_until_full(null_gpu):
    program = (
        "free = memory()[0]; answers = [launch() for _ in range(10)]; print((free -"
        " memory()[0]) // 2**30, *answers)"
    )
    assert (
        null_gpu(faults=Faults(growth_per_launch=GIB)).run("-c", CUDART + program).out
        == f"10{' 0' * 10}\n"
    )
    full = null_gpu(faults=Faults(growth_per_launch=20 * GIB)).run(
        "-c", CUDART + program
    )
    assert full.out == f"80{' 0' * 4}{' 2' * 6}\n", full
    slow = (
        CUDART
        + "launch(); free = memory()[0]; time.sleep(0.5); launch(); print((free -"
        " memory()[0]) // 2**29)"
    )
    assert null_gpu(faults=Faults(growth_per_s=GIB)).run("-c", slow).out == "1\n"


def test_neighbour_frees_its_memory_again(null_gpu):
    machine = null_gpu(
        faults=Faults(neighbour=5 * GIB, neighbour_from_s=0.5, neighbour_until_s=1.5)
    )
    program = (
        "free = []\n"
        "while time.sleep(0.05) or len(free) < 40: free.append(memory()[0] // 2**30)\n"
        "print(free[0] - min(free), free[-1] == free[0])"
    )
    assert machine.run("-c", CUDART + program).out == "5 True\n"


def test_counts_launches_with_copies(null_gpu):
    program = (
        "import torch; x = torch.zeros(4, 4, device='cuda'); y = x @ x;"
        " torch.nn.functional.layer_norm(y, (4,)); torch.arange(10).to('cuda');"
        " torch.arange(10).pin_memory().to('cuda', non_blocking=True); y.cpu();"
        " torch.cuda.synchronize()"
    )
    counts = null_gpu().run("-c", program).counts
    assert counts.kernels("layer_norm_kernel") == 1
    assert (
        counts["call", "cublasSgemm_v2"]
        + counts["call", "cublasGemmEx"]
        + counts["call", "cublasLtMatmul"]
        == 1
    )
    assert counts["wait", "pageable copy to the device"] == 1, counts
    assert counts["copy", "to the device"] == 1
    assert counts["wait", "pageable copy to the host"] == 1
    assert counts["wait", "cudaDeviceSynchronize"] == 1


def test_each_replay_counts_its_graph_again(null_gpu):
    program = (
        "import torch; x = torch.ones(4, 4, device='cuda'); x @ x; graph ="
        " torch.cuda.CUDAGraph()\nwith torch.cuda.graph(graph): (x @ x).sigmoid_()\nfor"
        " _ in range(5): graph.replay()"
    )
    counts = null_gpu().run("-c", program).counts
    assert (counts.kernels("sigmoid"), counts["call", "cublasSgemm_v2"]) == (
        1 + 5,
        2 + 5,
    ), counts


RANK = """
import os, sys, torch, torch.distributed as dist
rank = int(sys.argv[1])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", init_method=sys.argv[2], rank=rank, world_size=2)
while True:
    dist.all_reduce(torch.ones(8, device="cuda"))
    torch.cuda.synchronize()
    print("step", flush=True)
"""


def test_killed_rank_leaves_its_peer_waiting(null_gpu, tmp_path):
    machine = null_gpu(devices=2)
    with (
        machine.start("-c", RANK, "0", f"file://{tmp_path / 'store'}") as waiting,
        machine.start("-c", RANK, "1", f"file://{tmp_path / 'store'}") as killed,
    ):
        try:
            for process in (waiting, killed):
                assert process.stdout.readline() == "step\n", process.communicate()
            killed.send_signal(signal.SIGKILL)
            killed.wait()
            while steps(waiting):
                pass
            assert waiting.poll() is None
        finally:
            waiting.kill()
            killed.kill()


def steps(process: subprocess.Popen) -> bytes:
    """What it prints within a second."""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        return process.stdout.buffer.read1(65536) if selector.select(timeout=1) else b""
