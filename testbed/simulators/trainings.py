"""Small trainings on this machine's processors, with their records.

Each is limited by one thing.
"""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tomlkit

from autotune.base.process import start_child
from testbed.corpora import real_lengths, write_corpus
from testbed.simulators.hosts import hosts
from trainer.formats.run_record import Run, read_run

SAMPLES = 6000
SEQ_LENGTH_TOKENS = 256
NETWORK_BITS_PER_S = 200_000_000
TIMEOUT_S = 300
_TORCHRUN = ("-m", "torch.distributed.run")
MODEL = {
    "model_type": "bert",
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "max_position_embeddings": 512,
}


def deep(layers: int) -> dict[str, object]:
    """Return the model with this number of layers, as a change of a training."""
    return {"name": "deep", "config": MODEL | {"num_hidden_layers": layers}}


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheDirectory:
    """A dataset, and where runs go."""

    data: Path
    directory: Path


def make_place(directory: Path) -> CacheDirectory:
    """Make a dataset with the lengths of real functions."""
    return CacheDirectory(
        data=write_corpus(directory / "data", real_lengths(SAMPLES, 0)),
        directory=directory,
    )


def write_settings(path: Path, **changes: object) -> Path:
    """Write a profile with settings alone; a double underscore stands for a dot."""
    train: dict[str, object] = {
        "seq_length_tokens": SEQ_LENGTH_TOKENS,
        "layout": "packed",
        "micro_batch_size": 8,
        "global_batch_size": 16,
        "device": "cpu",
        "max_steps": 24,
        "warmup_steps": 4,
        "model": {"name": "small", "config": MODEL},
        "checkpoint": {"enabled": False},
        "evaluation": {"max_sequences": 1},
    }
    for key, value in changes.items():
        *names, last = key.split("__")
        table: dict[str, object] = train
        for name in names:
            inner = table.setdefault(name, {})
            assert isinstance(inner, dict)
            table = inner
        table[last] = value
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(tomlkit.dumps({"schema_version": 3, "train": train}))
    return path


def train(
    place: CacheDirectory,
    name: str,
    *,
    limit: str | None = None,
    ranks: int = 1,
    **changes: object,
) -> Run:
    """Train on this host; ``limit`` is one of ``testbed.simulators.limited_run``'s.

    Raises:
        RuntimeError: If the training did not finish, with its last words.
    """
    profile = write_settings(place.directory / "settings" / f"{name}.toml", **changes)
    module = (
        ["-m", "trainer"]
        if limit is None
        else ["-m", "testbed.simulators.limited_run", limit]
    )
    out = place.directory / "runs" / name
    started = (
        []
        if ranks == 1
        else [*_TORCHRUN, "--standalone", "--nproc-per-node", str(ranks)]
    )
    _finish([[sys.executable, *started, *module, *_arguments(profile, place, out)]])
    return read_run(out)


def train_over_network(
    place: CacheDirectory,
    name: str,
    bits_per_s: int = NETWORK_BITS_PER_S,
    **changes: object,
) -> Run:
    """Train on two hosts behind slow links; needs root.

    Raises:
        MachineLacks: If namespaces cannot be made.
        RuntimeError: If the training did not finish, with its last words.
    """
    profile = write_settings(place.directory / "settings" / f"{name}.toml", **changes)
    out = place.directory / "runs" / name
    with hosts(2, bits_per_s, name="adv") as lab:
        commands = [
            host.command(
                "env",
                f"GLOO_SOCKET_IFNAME={host.interface}",
                "OMP_NUM_THREADS=1",
                sys.executable,
                *_TORCHRUN,
                "--nnodes",
                "2",
                "--nproc-per-node",
                "1",
                "--node-rank",
                str(number),
                "--master-addr",
                lab[0].address,
                "--master-port",
                "29533",
                "-m",
                "trainer",
                *_arguments(profile, place, out),
            )
            for number, host in enumerate(lab)
        ]
        _finish(commands)
    return read_run(out)


def _arguments(profile: Path, place: CacheDirectory, out: Path) -> list[str]:
    return [str(profile), "--data", str(place.data), "--out", str(out)]


def _finish(commands: Sequence[Sequence[str]]) -> None:
    """Run commands beside each other until all have ended."""
    begun = [
        start_child(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command in commands
    ]
    try:
        outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in begun]
    finally:
        for process in begun:
            if process.poll() is None:
                process.kill()
    for process, words in zip(begun, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(words[-2000:])
