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
size = Dim3(1, 1, 1)
pointer = ctypes.c_void_p
cuda.cudaLaunchKernel.argtypes = (
    pointer, Dim3, Dim3, pointer, ctypes.c_size_t, pointer
)
kernel = ctypes.cast(cuda.cudaMalloc, pointer)
def launch(): return cuda.cudaLaunchKernel(kernel, size, size, None, 0, None)
def memory():
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    cuda.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value
"""
NVML = """
import pynvml
pynvml.nvmlInit()
gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
"""


@pytest.mark.parametrize("name", cards())
def test_gpu_has_the_memory_of_its_kind(null_gpu, name):
    program = (
        "print(pynvml.nvmlDeviceGetName(gpu), memory()[1],"
        " pynvml.nvmlDeviceGetMemoryInfo(gpu).total, sep='|')"
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


ACCOUNT_FOR_MEMORY = """
import json, torch
from autotune.memory.decide.overheads import CONTEXT_BYTES
def used(): return pynvml.nvmlDeviceGetMemoryInfo(gpu).used
before = used()
torch.zeros(1, device="cuda")
context = used() - before - 2 * 2**20  # one small segment
kept = torch.zeros(2**30, dtype=torch.uint8, device="cuda")
try:
    torch.empty(100 * 2**30, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    message = str(error)
processes = pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)
print(json.dumps({
    "context": context,
    "assumed": CONTEXT_BYTES.usual,
    "reserved": torch.cuda.memory_reserved(),
    "message": message,
    "driver": pynvml.nvmlSystemGetDriverVersion(),
    "pids": [process.pid for process in processes],
}))
"""


def test_memory_is_accounted_for_as_assumed(
    null_gpu,
):
    machine = null_gpu(faults=Faults(neighbour=GIB))
    ended = machine.run("-c", NVML + ACCOUNT_FOR_MEMORY)
    account = json.loads(ended.out)
    assert account["context"] == account["assumed"]
    assert account["reserved"] == GIB
    # torch's own message.
    assert "CUDA out of memory. Tried to allocate 100.00 GiB" in account["message"]
    assert account["driver"] == "0.0 (nullgpu)"
    assert 1 in account["pids"]
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
    ("faults", "program", "output"),
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
def test_libraries_fail_on_purpose(null_gpu, faults, program, output):
    planned = Faults(faults=faults, may_miss=output == "fits")
    ended = null_gpu(devices=2, faults=planned).run("-c", f"import torch; {program}")
    assert output in ended.out + ended.err, ended


def test_missed_faults_are_found(null_gpus):
    at_first_call = "cudaMemGetInfo=2"
    at_second_call = "cudaMemGetInfo=2@2"
    of_unknown_function = "cudaMemInfo=2"
    planned = (at_first_call, at_second_call, of_unknown_function)
    machine = null_gpus(faults=Faults(faults=",".join(planned)))
    assert machine.run("-c", f"{CUDART}memory()").code == 0
    assert machine.missed() == [at_second_call, of_unknown_function]


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
gpu = pynvml.nvmlDeviceGetHandleByUUID("GPU-6e756c6c-6770-7500-0000-000000000000")
print(*(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu) for _ in range(4)))
print(pynvml.nvmlDeviceGetMinorNumber(gpu))
pynvml.nvmlDeviceGetIndex(gpu)
"""
    faults = Faults(absent=absent, thermal_first=1, thermal_samples=2)
    ended = null_gpu(faults=faults).run("-c", program)
    assert ended.out == "0 64 64 0\n0\n", ended
    assert "Function Not Found" in ended.err, ended


def test_cuda_sees_only_the_mig_slice(null_gpu):
    program = """
import torch
properties = torch.cuda.get_device_properties(0)
mig_slice = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0)
print(
    properties.name,
    properties.total_memory,
    pynvml.nvmlDeviceGetName(gpu),
    pynvml.nvmlDeviceGetUUID(mig_slice)[:4],
    sep="|",
)
"""
    faults = Faults(mig="1g.12gb", mig_memory=11 * GIB)
    ended = null_gpu(faults=faults).run("-c", NVML + program)
    assert (
        ended.out == f"NVIDIA H100 NVL MIG 1g.12gb|{11 * GIB}|NVIDIA H100 NVL|MIG-\n"
    ), ended


def test_non_pytorch_memory_can_grow_until_full(null_gpu):
    program = """
free, _ = memory()
errors = [launch() for _ in range(10)]
free_after, _ = memory()
print((free - free_after) // 2**30, *errors)
"""
    machine = null_gpu(faults=Faults(growth_per_launch=GIB))
    ended = machine.run("-c", CUDART + program)
    assert ended.out == "10 0 0 0 0 0 0 0 0 0 0\n", ended
    full_machine = null_gpu(faults=Faults(growth_per_launch=20 * GIB))
    ended = full_machine.run("-c", CUDART + program)
    assert ended.out == "80 0 0 0 0 2 2 2 2 2 2\n", ended


def test_non_pytorch_memory_can_grow_with_time(null_gpu):
    program = """
launch()
free, _ = memory()
time.sleep(0.5)
launch()
free_after, _ = memory()
print((free - free_after) // 2**29)
"""
    machine = null_gpu(faults=Faults(growth_per_s=GIB))
    assert machine.run("-c", CUDART + program).out == "1\n"


def test_neighbour_frees_its_memory_again(null_gpu):
    machine = null_gpu(
        faults=Faults(neighbour=5 * GIB, neighbour_from_s=0.5, neighbour_until_s=1.5)
    )
    program = """
free_gib = []
for _ in range(40):
    time.sleep(0.05)
    free_gib.append(memory()[0] // 2**30)
print(free_gib[0] - min(free_gib), free_gib[-1] == free_gib[0])
"""
    assert machine.run("-c", CUDART + program).out == "5 True\n"


def test_counts_launches_with_copies(null_gpu):
    program = """
import torch
x = torch.zeros(4, 4, device="cuda")
y = x @ x
torch.nn.functional.layer_norm(y, (4,))
torch.arange(10).to("cuda")
torch.arange(10).pin_memory().to("cuda", non_blocking=True)
y.cpu()
torch.cuda.synchronize()
"""
    counts = null_gpu().run("-c", program).counts
    assert counts.kernels("layer_norm_kernel") == 1
    matmul_functions = ("cublasSgemm_v2", "cublasGemmEx", "cublasLtMatmul")
    assert sum(counts["call", function] for function in matmul_functions) == 1
    assert counts["wait", "pageable copy to the device"] == 1, counts
    assert counts["copy", "to the device"] == 1
    assert counts["wait", "pageable copy to the host"] == 1
    assert counts["wait", "cudaDeviceSynchronize"] == 1


def test_each_replay_counts_its_graph_again(null_gpu):
    program = """
import torch
x = torch.ones(4, 4, device="cuda")
x @ x
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    (x @ x).sigmoid_()
for _ in range(5):
    graph.replay()
"""
    counts = null_gpu().run("-c", program).counts
    assert counts.kernels("sigmoid") == 1 + 5, counts
    assert counts["call", "cublasSgemm_v2"] == 2 + 5, counts


REDUCE_FOREVER = """
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
    store = f"file://{tmp_path / 'store'}"
    with (
        machine.start("-c", REDUCE_FOREVER, "0", store) as waiting,
        machine.start("-c", REDUCE_FOREVER, "1", store) as killed,
    ):
        try:
            for process in (waiting, killed):
                assert process.stdout.readline() == "step\n", process.communicate()
            killed.send_signal(signal.SIGKILL)
            killed.wait()
            while output_within_a_second(waiting):
                pass
            assert waiting.poll() is None
        finally:
            waiting.kill()
            killed.kill()


def output_within_a_second(process: subprocess.Popen) -> bytes:
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        if not selector.select(timeout=1):
            return b""
        return process.stdout.buffer.read1(65536)
