"""Commands that start ranks which measure together: on this node, or on the first nodes of the SLURM job it is in."""

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence

from autotune.cluster.rendezvous import choose_port, is_free, own_address, read_addresses, resolve_own_name
from autotune.cluster.starter import STARTER_VARIABLE
from autotune.cluster.torchrun import Meeting, torchrun_command

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
Start = Callable[[Sequence[str]], list[str]]


def on_this_node(ranks: int, torch_version: str) -> Start:
    """One torchrun of so many ranks."""

    def start(arguments: Sequence[str]) -> list[str]:
        return list(torchrun_command(sys.executable, arguments, ranks=ranks, torch_version=torch_version))

    return start


def on_nodes_of_job(nodes: int, ranks: int, torch_version: str, environment: Mapping[str, str] = os.environ) -> Start:
    """One torchrun on each of the job's first nodes, by one ``srun``; to be called on the first of them.

    Ranks are numbered from this node on: rank 0 is here. Where the job's script starts things
    (``autotune.cluster.starter``) it is asked to.

    Args:
        nodes: So many of the job's.
        ranks: On each.
        torch_version: The installed one.
        environment: As SLURM set it for the job.
    """
    interface = next((environment[name] for name in INTERFACE_VARIABLES if environment.get(name)), None)
    option = "" if interface is None else f" --interface {shlex.quote(interface)}"
    job = environment["SLURM_JOB_ID"]

    def start(arguments: Sequence[str]) -> list[str]:
        here = own_address(interface, read_addresses(), resolve_own_name())
        port, _ = choose_port(int(job), lambda port: is_free(here, port))
        meeting = Meeting(
            nodes=nodes, endpoint=f"{here}:{port}", job=job, address="$address", node_rank="$SLURM_NODEID"
        )
        words = torchrun_command(sys.executable, arguments, ranks=ranks, torch_version=torch_version, meeting=meeting)
        asking = f"{shlex.quote(sys.executable)} -m autotune launch address --with-interface{option}"
        # gloo would otherwise go by the node's name, which may stand for an address that leads to no other node.
        own = (
            f'own=$({asking}) || exit\nread -r address interface <<< "$own"\n'
            'export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$interface}"\nexec '
        )
        # Words with a $ are the node's own to fill in.
        script = own + " ".join(word if "$" in word else shlex.quote(word) for word in words)
        if environment.get(STARTER_VARIABLE):
            return [sys.executable, "-m", "autotune", "launch", "outside", f"--nodes={nodes}", f"--script={script}"]
        # In a larger job SLURM may choose other nodes for a step than the first ones.
        this_one = environment.get("SLURMD_NODENAME")
        with_this_one = [f"--nodelist={this_one}"] if this_one else []
        return [
            "srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", *with_this_one,
            f"--cpus-per-task={environment.get('SLURM_CPUS_PER_TASK', '1')}", "--export=ALL", "--kill-on-bad-exit=1",
            "bash", "-c", script,
        ]  # fmt: skip

    return start
