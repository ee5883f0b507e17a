"""Count the requests of a steady optimizer step to a GPU.

The trainer's whole loop runs, and nothing is computed. ``python -m
testbed.nullgpu.steps PROFILE DATA [ASSIGNMENT …]`` is the program that runs there.
"""

import contextlib
import faulthandler
import json
import os
import re
import signal
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import tomlkit

from testbed.corpora import real_lengths, write_corpus
from testbed.nullgpu.counts import Counts
from testbed.programs import FLASH_ATTENTION_4, TORCHAO
from trainer.formats.presets import model_settings
from trainer.health.watchdog import Watchdog

ROOT = Path(__file__).parents[2]
WITHOUT: dict[str, tuple[str, Any]] = {
    "weights in bf16 once per step": (
        "trainer.model.masked_lm.verify_working_copies",
        lambda _: "left out",
    ),
    "one matmul for queries, keys, values": (
        "trainer.model.working_copies._SIBLINGS",
        (),
    ),
    "layer norms that keep bf16": (
        "trainer.model.masked_lm.keep_norms_in_bf16",
        lambda *_: None,
    ),
    "token types without look-up": (
        "trainer.model.masked_lm._expand_first_vector",
        lambda part, ids: type(part).forward(part, ids),
    ),
}
"""Optimisations that no setting turns off, by name, with what replaces them."""
WARM_STEPS, FIRST_STEP, LAST_STEP = 2, 20, 30
"""Steps in which graphs may be compiled; counted are steps after ``FIRST_STEP``, to
``LAST_STEP``."""
_STEPS = LAST_STEP - FIRST_STEP
DOCUMENTS = 4_000
_MATMUL = re.compile(r"cublas(LtMatmul|\w*[Gg]emm\w*)")
_KIND_OF_CALL = {"cudnnBackendExecute": "kernel"} | dict.fromkeys(
    ("cudaMalloc", "cudaHostAlloc", "cuMemCreate"), "allocation"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCase:
    """A training whose steps are counted: one micro-batch of packed sequences."""

    model: str
    compiled: bool
    rows: int = 8
    width: int = 512

    @property
    def name(self) -> str:
        """Model, and whether its layers are compiled."""
        return f"{self.model} {'compiled' if self.compiled else 'eager'}"

    def profile(self) -> str:
        """Return a profile for the trainer."""
        train = {
            "model": model_settings(self.model).model_dump(exclude_defaults=True),
            "device": "cuda",
            "layout": "packed",
            "precision": "bf16",
            "attention_dropout": 0.0,
            "compile": self.compiled,
            "seq_length_tokens": self.width,
            "micro_batch_size": self.rows,
            "global_batch_size": self.rows,
            "max_steps": LAST_STEP,
            "checkpoint": {"enabled": False},
        }
        return tomlkit.dumps({"schema_version": 3, "train": train})


def counted(
    case: StepCase,
    assignments: tuple[str, ...] = (),
    *,
    traced: str = "wait",
    without: str = "",
) -> dict[str, Any]:
    """Return counts per step by kind and name, and the lines of code behind some.

    Args:
        case: The step.
        assignments: ``train.KEY=VALUE``, as the trainer takes them.
        traced: Beginning of the ``kind:name`` whose lines of code are returned.
        without: One of ``WITHOUT``.

    Returns:
        The counts and lines. Kinds are those of ``Counts``, with ``matmul`` for calls
        of cuBLAS and ``allocation`` for those that make the allocators' memory.
    """
    from testbed.nullgpu.environment import make
    from testbed.nullgpu.machine import Machine

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        libraries = [ROOT]
        if "float8" in str(assignments):
            libraries.append(TORCHAO)
        if "fa4" in str(assignments):
            libraries.append(FLASH_ATTENTION_4)
        paths = {"PYTHONPATH": ":".join(map(str, libraries))}
        machine = Machine(
            environment=make(),
            folder=place,
            variables={"NULLGPU_TRACE": traced, "STEPS_WITHOUT": without} | paths,
        )
        (place / "profile.toml").write_text(case.profile())
        data = write_corpus(place / "data", real_lengths(DOCUMENTS, seed=1))
        ended = machine.run(
            "-m",
            "testbed.nullgpu.steps",
            place / "profile.toml",
            data,
            *assignments,
            timeout_s=3600,
        )
    if ended.code:
        return asdict(case) | {"error": str(ended)[-2000:]}
    counts: dict[str, Any] = json.loads(ended.out.strip().splitlines()[-1])
    lines = {
        name: {line: number / _STEPS for line, number in line_counts.most_common()}
        for name, line_counts in _lines(ended.err)
    }
    return asdict(case) | counts | {"lines": lines}


def _lines(written: str) -> list[tuple[str, Counter[str]]]:
    """Return how often each line of the trainer requested a traced event.

    A line is named together with its caller, the innermost first.
    """
    counts_by_name: dict[str, Counter[str]] = {}
    for event in written.split("nullgpu trace ")[1:]:
        name, _, stack = event.partition("\n")
        frames = re.findall(
            rf'File "{re.escape(str(ROOT))}/(trainer/\S+)", line (\d+) in (\w+)', stack
        )
        line = (
            ", from ".join("{}:{} {}".format(*frame) for frame in frames[:2])
            or "a thread of torch"
        )
        counts_by_name.setdefault(name, Counter())[line] += 1
    return sorted(counts_by_name.items())


class _Counting(Watchdog):
    """Reads the counts when the trainer reports that a step was submitted."""

    def __init__(self) -> None:
        super().__init__(timeout_s=float("inf"))
        self.counts: list[Counts] = []
        self.graphs: list[int] = []

    def heartbeat(self, step: int | None = None) -> None:
        """Note counts before and after the steady steps.

        Stacks are written during them.
        """
        super().heartbeat(step)
        if step == FIRST_STEP:
            faulthandler.register(signal.SIGRTMIN, all_threads=False)
        if step == LAST_STEP:
            faulthandler.unregister(signal.SIGRTMIN)
        if step in (FIRST_STEP, LAST_STEP):
            self.counts.append(
                Counts.read([Path(os.environ["NULLGPU_COUNTS"]) / str(os.getpid())])
            )
        if step in (WARM_STEPS, LAST_STEP):
            from torch._dynamo.utils import counters

            self.graphs.append(counters["stats"]["unique_graphs"])


def main(profile: str, data: str, *assignments: str) -> None:
    """Train, and print what a step counts."""
    import torch

    from trainer.config.resolve import resolve
    from trainer.data.batch_plan import make_plan
    from trainer.data.dataset import TokenDataset
    from trainer.data.loader import micro_batch_plans
    from trainer.loop import train
    from trainer.record import meter
    from trainer.record.writer import RunWriter
    from trainer.runtime.device_events import to_host
    from trainer.runtime.ranks import join_ranks

    resolved = resolve(Path(profile), assignments=assignments, data=Path(data))
    ranks, watch = join_ranks(resolved.config), _Counting()
    writer = RunWriter(Path(profile).with_name("run"))
    # Nothing is computed: sums of tokens would be 0, and divided by.
    left_out = WITHOUT.get(os.environ.get("STEPS_WITHOUT", ""))
    leaving_out = patch(*left_out) if left_out else contextlib.nullcontext()
    with (
        leaving_out,
        # It compares values.
        patch("trainer.build.check_flash_attention_4"),
        patch.object(
            meter,
            "to_host",
            lambda tensor: torch.ones_like(to_host(tensor), pin_memory=False),
        ),
    ):
        train(resolved, ranks, writer, lambda row: None, watchdog=watch)
    before, after = watch.counts
    counts: dict[str, dict[str, float]] = {}
    for (kind, name), number in after.since(before).most_common():
        counted_kind = (
            "matmul" if _MATMUL.fullmatch(name) else _KIND_OF_CALL.get(name, kind)
        )
        counts.setdefault(counted_kind, {})[name] = number / _STEPS
    dataset = TokenDataset.open(Path(data))
    plan = make_plan(resolved.config, len(dataset), ranks.world_size)
    documents = [
        len(batch_plan.segments.samples)
        for batch_plan in micro_batch_plans(
            dataset, resolved.config, plan, 0, steps=LAST_STEP
        )
    ]
    answer = {
        "counts": counts,
        "graphs": watch.graphs[0],
        "recompilations": watch.graphs[1] - watch.graphs[0],
        "documents": [min(documents), max(documents)],
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
