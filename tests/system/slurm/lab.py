"""A SLURM cluster on this host, which is ended and removed without a trace.

It has its own keys, daemons, ports and directory; a SLURM or MUNGE that already runs on
this host is not touched. It runs as root or not, without systemd, control groups or a
network. Node names do not resolve, as on some clusters.

``python -m tests.system.slurm.lab`` starts one and prints the environment to use it
with; Ctrl-C ends it.
"""

import contextlib
import os
import pwd
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.system.faults.kills import until

PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "sbatch", "scontrol")
NODES = ("lab1", "lab2")
PARTITION = "short"
DEAD_AFTER_S = 6
"""Time after which a node that does not answer is down (the default is 300)."""
_END_TIMEOUT_S = 20.0
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def missing() -> str | None:
    """Return what a cluster lacks to be started here; None if it lacks nothing."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (Debian: slurm-wlm, munge)"
    try:
        socket.gethostbyname(socket.gethostname())
    except OSError:
        return (
            f"{socket.gethostname()} does not resolve: slurmctld needs it in /etc/hosts"
        )
    return None


class Lab:
    """A running cluster in a directory with a short path, as sockets lie in it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM", "SBATCH", "MUNGE"))
        }
        self.environment = inherited | {
            "SLURM_CONF": str(directory / "slurm.conf"),
            "PATH": _PATH,
        }
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start everything, and wait until the nodes are idle."""
        for name in ("state", "spool", "log"):
            (self.directory / name).mkdir()
        (self.directory / "slurm.conf").write_text(_configuration(self.directory))
        key = self.directory / "munge.key"
        subprocess.run(
            ["mungekey", "--create", "--force", f"--keyfile={key}"],
            env=self.environment,
            check=True,
        )
        key.chmod(0o600)
        self._start(
            "munged",
            "--foreground",
            "--force",
            f"--socket={self.directory / 'munge.socket'}",
            f"--key-file={key}",
            f"--pid-file={self.directory / 'munged.pid'}",
            f"--seed-file={self.directory / 'munged.seed'}",
            f"--log-file={self.directory / 'log' / 'munged.log'}",
        )
        until((self.directory / "munge.socket").exists, "munged")
        self._start("slurmctld", "-D")
        for node in NODES:
            self.start_node(node)
        until(self._is_idle, "slurmctld and slurmd", tell=self.logs)

    def start_node(self, node: str) -> None:
        self._start("slurmd", "-D", "-N", node, name=node)

    def kill_node(self, node: str) -> None:
        """Kill a node: its slurmd and everything that it started."""
        daemon = self.daemons.pop(node)
        # First, as it would report the end of its steps.
        daemon.kill()
        daemon.wait()
        _kill(self._step_pids(node))

    def ask(self, *command: str) -> str:
        return subprocess.run(
            command,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        ).stdout

    def job(self, number: str) -> dict[str, str]:
        return dict(
            re.findall(r"(\S+?)=(\S*)", self.ask("scontrol", "show", "job", number))
        )

    def wait_for(
        self, number: str, *states: str, timeout_s: float = 60.0
    ) -> dict[str, str]:
        until(
            lambda: self.job(number).get("JobState") in states,
            f"job {number} {states}",
            timeout_s,
            self.logs,
        )
        return self.job(number)

    def clear(self) -> None:
        if self.ask("squeue", "--noheader"):
            self.ask("scancel", f"--partition={PARTITION}")
            until(
                lambda: not self.ask("squeue", "--noheader"), "no job", tell=self.logs
            )

    def logs(self) -> str:
        return "\n".join(
            f"== {path.name}\n{path.read_text(errors='replace')[-2000:]}"
            for path in self.directory.glob("log/*")
        )

    def stop(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.ask("scancel", "--state=PENDING", f"--partition={PARTITION}")
            self.ask("scancel", "--signal=KILL", "--full", f"--partition={PARTITION}")
            self.ask("scancel", f"--partition={PARTITION}")
        step_pids = []
        for node in NODES:
            step_pids += self._step_pids(node)
        for daemon in reversed(self.daemons.values()):
            daemon.terminate()
        for daemon in self.daemons.values():
            try:
                daemon.wait(timeout=_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        _kill(step_pids)

    def _start(self, program: str, *arguments: str, name: str | None = None) -> None:
        with (self.directory / "log" / f"{name or program}.out").open("ab") as log:
            self.daemons[name or program] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", program, *arguments],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                start_new_session=True,  # a terminal's Ctrl-C is not for them
                # Nodes have all processors, though a test that runs beside others has
                # one.
                preexec_fn=lambda: os.sched_setaffinity(0, range(os.cpu_count() or 1)),  # noqa: PLW1509 - one call
            )

    def _is_idle(self) -> bool:
        dead = [
            name for name, daemon in self.daemons.items() if daemon.poll() is not None
        ]
        if dead:
            raise AssertionError(f"{dead} ended\n{self.logs()}")
        return self.ask("sinfo", "--noheader", "--format=%T %D").split() == [
            "idle",
            str(len(NODES)),
        ]

    def _step_pids(self, node: str) -> list[int]:
        """Return the processes of this lab's jobs on a node, their daemons first.

        A daemon would report the end of its step.
        """
        environment_of_steps = {
            "SLURM_CONF": self.environment["SLURM_CONF"],
            "SLURMD_NODENAME": node,
        }
        steps = [
            process
            for process in psutil.process_iter(["environ"])
            if environment_of_steps.items() <= (process.info["environ"] or {}).items()
        ]
        daemon_pids: list[int] = []
        for step in steps:
            with contextlib.suppress(psutil.Error):
                parent = step.parent()
                if parent is not None and parent.name().startswith("slurmstepd"):
                    daemon_pids.append(parent.pid)
        return [*dict.fromkeys(daemon_pids), *(step.pid for step in steps)]


@contextlib.contextmanager
def running_lab() -> Iterator[Lab]:
    with tempfile.TemporaryDirectory(
        prefix="lab-", dir="/tmp", ignore_cleanup_errors=True
    ) as directory:
        lab = Lab(Path(directory))
        try:
            lab.start()
            yield lab
        finally:
            lab.stop()


def _configuration(directory: Path) -> str:
    host = socket.gethostname()
    user = pwd.getpwuid(os.getuid()).pw_name
    controller_port, *node_ports = _free_ports(1 + len(NODES))
    nodes = "\n".join(
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port}"
        f" CPUs={os.cpu_count()} RealMemory=100000 State=UNKNOWN"
        for node, port in zip(NODES, node_ports, strict=True)
    )
    return f"""\
ClusterName=lab{secrets.token_hex(2)}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={directory}/munge.socket,cred_expire=5
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool/%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/log/slurmctld.log
SlurmdLogFile={directory}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
TaskPluginParam=cores
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout={DEAD_AFTER_S}
KillWait=5
MessageTimeout=5
MinJobAge=600
JobRequeue=1
{nodes}
PartitionName={PARTITION} Nodes=ALL Default=YES MaxTime=60 State=UP
"""


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        ports = []
        for bound_socket in sockets:
            bound_socket.bind(("127.0.0.1", 0))
            _, port = bound_socket.getsockname()
            ports.append(port)
        return ports


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    with running_lab() as lab, contextlib.suppress(KeyboardInterrupt):
        print(f"export SLURM_CONF={lab.environment['SLURM_CONF']}", flush=True)
        signal.pause()
