"""Your own code as trials run it: a bench for ``hostile.py`` that is started once."""

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.memory.measure import probe_subject
from autotune.memory.subject_probe import SubjectProbe, SubjectProbeRequest
from autotune.subjects.bench import open_subject
from autotune.subjects.own.subject import FunctionSubject

MODULE = "hostile"
MEMORY_BYTES = 80_000_000


class OwnCodeBench:
    """A bench on which any function of the module can be probed and swept."""

    def __init__(self, bench, folder: Path):
        self._bench = bench
        self._folder = folder

    def _of(self, **functions):
        names = {
            f"{role}_function": f"{MODULE}:{name}"
            for role, name in functions.items()
            if name
        }
        code = FunctionSubject(**names)
        sources = dict.fromkeys(code.code(), "0")
        return replace(self._bench, subject=code, sources=sources), code

    def probe(
        self, name, memory_bytes=MEMORY_BYTES, *, timeout_s=20, ranks=1, **options
    ):
        """Probe a function of the module, and return the evidence and the runner."""
        arguments = options.pop("arguments", {})
        size_argument = options.pop("along", "micro_batch_size")
        bench, code = self._of(step=name)
        code = code.model_copy(update={"along": size_argument, "arguments": arguments})
        options = {"measures_throughput": False, "headroom_share": 0.0} | options
        request = SubjectProbeRequest(
            subject=code, reports=self._folder, trial_timeout_s=timeout_s, **options
        )
        runner = bench.runner(
            self._folder / name, bench.fingerprint, lambda *_: None, 8
        )
        _, evidence = probe_subject(
            SubjectProbe(
                bench=replace(bench, subject=code),
                request=request,
                memory_budget_bytes=memory_bytes,
                local_ranks=ranks,
            ).size_probe(),
            runner,
            bench.site.host.ram_available_bytes,
        )
        return evidence, runner


@pytest.fixture(scope="session")
def own_code(tmp_path_factory) -> OwnCodeBench:
    folder = tmp_path_factory.mktemp("own")
    code = FunctionSubject(
        step_function=f"{MODULE}:behaves", loader_function=f"{MODULE}:sleepy"
    )
    with open_subject("cpu", code, Path(__file__).parent, import_timeout_s=60) as bench:
        yield OwnCodeBench(bench, folder)
