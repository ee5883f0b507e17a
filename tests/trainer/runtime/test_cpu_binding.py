"""Ranks that are bound to the CPUs near their GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.formats.cpu_environment import NUMA_VARIABLE
from trainer.runtime.cpu_binding import bind_to_nearest_cpus

GPU_ADDRESS = "0000:DC:00.0"


def write_machine(root: Path, *, gpu_node: int, cpus_of_nodes: list[str]) -> None:
    """Write the ``/sys`` of a machine with a GPU, below ``root``.

    Args:
        root: Root of the file system.
        gpu_node: NUMA node of the GPU, or -1 as on a machine with a single node.
        cpus_of_nodes: CPUs of each NUMA node, as the kernel lists them.
    """
    files = {root / "sys/bus/pci/devices/0000:dc:00.0/numa_node": str(gpu_node)}
    for node, cpu_list in enumerate(cpus_of_nodes):
        files[root / f"sys/devices/system/node/node{node}/cpulist"] = cpu_list
    for path, text in files.items():
        path.parent.mkdir(parents=True)
        path.write_text(f"{text}\n")


@pytest.mark.parametrize(
    ("address", "gpu_node", "environment", "near_cpus"),
    [
        pytest.param(GPU_ADDRESS, 1, {}, {4, 5}, id="near"),
        pytest.param(GPU_ADDRESS, 0, {}, set(), id="near CPUs not allowed"),
        pytest.param(GPU_ADDRESS, -1, {}, set(), id="single node"),
        pytest.param(GPU_ADDRESS, 7, {}, set(), id="node not listed"),
        pytest.param(GPU_ADDRESS, 1, {NUMA_VARIABLE: "0"}, set(), id="disabled"),
        pytest.param("0000:01:00.0", 1, {}, set(), id="another GPU"),
    ],
)
def test_rank_gets_allowed_cpus_near_its_gpu(
    tmp_path, monkeypatch, address, gpu_node, environment, near_cpus
):
    write_machine(tmp_path, gpu_node=gpu_node, cpus_of_nodes=["0-1", "4-5,6,7"])
    allowed_cpus = {2, 3, 4, 5}
    cpus_by_thread = {}

    def note_binding(thread, cpus):
        cpus_by_thread[thread] = cpus

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed_cpus)
    monkeypatch.setattr(os, "sched_setaffinity", note_binding)
    assert bind_to_nearest_cpus(address, environment, root=tmp_path) == near_cpus
    main_thread = os.getpid()
    assert cpus_by_thread.get(main_thread, set()) == near_cpus


BINDING_PROGRAM = """
import os, pathlib, sys, threading
import torch
from trainer.runtime.cpu_binding import bind_to_nearest_cpus
torch.ones(512, 512) @ torch.ones(512, 512)
ended = threading.Event()
threading.Thread(target=ended.wait, daemon=True).start()
near = bind_to_nearest_cpus("0000:dc:00.0", root=pathlib.Path(sys.argv[1]))
threads = [int(name) for name in os.listdir("/proc/self/task")]
masks = {frozenset(os.sched_getaffinity(thread)) for thread in threads}
assert masks == {near}, masks
if os.fork() == 0:
    os._exit(0 if os.sched_getaffinity(0) == near else 1)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
print(*near)
"""
"""Binds itself on the machine in its argument, while it has several threads, and prints
its CPUs. It fails if a thread or a child is not bound."""


@pytest.mark.system
def test_every_thread_and_child_is_bound(tmp_path):
    last_cpu = (os.cpu_count() or 1) - 1
    if last_cpu == 0:
        pytest.skip("this machine has one processor: nothing can be bound to less")
    write_machine(tmp_path, gpu_node=0, cpus_of_nodes=[str(last_cpu)])
    process = subprocess.run(
        [sys.executable, "-c", BINDING_PROGRAM, tmp_path],
        capture_output=True,
        text=True,
        check=False,
        # A test that runs beside others has one processor; this one needs two.
        preexec_fn=lambda: os.sched_setaffinity(0, range(last_cpu + 1)),
    )
    assert (process.stdout, process.returncode) == (f"{last_cpu}\n", 0), process.stderr
