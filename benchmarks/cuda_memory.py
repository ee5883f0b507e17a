"""``python -m benchmarks.cuda_memory --json FILE``: predicted memory beside what torch's own CUDA allocator did.

Each configuration is probed as a user would, on pretended GPUs: torch's CUDA build, its caching allocator, autograd and
kernels' requests are real, only kernels do nothing. Its memory is predicted on the meta device, and trials then find
the largest micro-batch that the allocator serves. Some are then trained on packed sequences of documents of real
lengths, at the size that a probe chooses. Figures are the allocator's; what lies outside it is pretended, and compared
with nothing.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autotune.core.cards import find_card
from autotune.core.outcome import Measured
from autotune.decide.choose import rows_with_headroom
from autotune.decide.search import bracket
from autotune.decide.surroundings import Expected, expected_on_gpu
from autotune.errors import AutotuneError
from autotune.measure.clock import SystemClock
from autotune.measure.machine import ForkServerMachine
from autotune.measure.nvml import NvmlMonitor
from autotune.search.plan_memory import HEADROOM_SHARE
from autotune.search.probe import ProbeRequest, Search, step_config
from autotune.search.trials import TrialRunner
from autotune.show.tables import text_table
from autotune.store import Ledger, json_rows, write_atomically
from benchmarks import bars
from benchmarks.bars import Bar
from benchmarks.corpora import real_lengths, synthetic_manifest, write_corpus
from trainer.config import Attention, Checkpointing, Head, Layout, ModelSettings, Precision, Strategy
from trainer.presets import model_settings

VOCAB_SIZE = 30_522
TRAINED_STEPS, TRAINED_DOCUMENTS = 300, 60_000
MAX_ROWS = 16_384
ROBERTA = {
    "model_type": "roberta", "num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12,
    "intermediate_size": 3072, "max_position_embeddings": 514, "type_vocab_size": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One configuration."""

    model: str
    gpu: str = "h100-nvl-94gb"
    precision: Precision = "bf16"
    attention: Attention = "varlen"
    dropout: float = 0.0
    checkpointing: Checkpointing = "none"
    compiled: bool = False
    layout: Layout = "packed"
    head: Head = "masked"
    width: int = 512
    documents: float = 4.0
    micro_batches: int = 2
    ranks: int = 1
    strategy: Strategy = "ddp"
    trained: bool = False
    """Whether it is also trained."""

    @property
    def name(self) -> str:
        """What sets it apart."""
        usual = Case(model=self.model)
        own = {key: value for key, value in asdict(self).items() if value != getattr(usual, key)}
        words = [f"{key} {value}" for key, value in own.items() if key not in {"model", "trained"}]
        return ", ".join([self.model, *words])


CASES = (
    Case(model="bert-120m", trained=True),
    Case(model="bert-120m", checkpointing="selective"),
    Case(model="bert-120m", checkpointing="full", trained=True),
    Case(model="bert-350m", trained=True),
    Case(model="bert-350m", checkpointing="selective"),
    Case(model="bert-350m", checkpointing="full", trained=True),
    Case(model="bert-350m", checkpointing="full", micro_batches=1),
    Case(model="modernbert-base", trained=True),
    Case(model="modernbert-base", checkpointing="selective"),
    Case(model="modernbert-base", checkpointing="full"),
    Case(model="modernbert-large", trained=True),
    Case(model="modernbert-large", checkpointing="full"),
    Case(model="roberta"),
    Case(model="roberta", checkpointing="full"),
    Case(model="bert-120m", attention="sdpa", dropout=0.1, trained=True),
    Case(model="bert-350m", attention="sdpa", dropout=0.1, checkpointing="full"),
    Case(model="modernbert-base", attention="sdpa"),
    Case(model="bert-120m", attention="sdpa", dropout=0.1, width=128),
    Case(
        model="bert-120m", precision="fp32", attention="sdpa", dropout=0.1, layout="padded", head="dense",
        micro_batches=1,
    ),
    Case(
        model="bert-350m", precision="fp32", attention="sdpa", dropout=0.1, layout="padded", head="dense",
        micro_batches=1,
    ),
    Case(model="modernbert-base", precision="fp32", attention="sdpa"),
    Case(model="bert-120m", precision="fp32", attention="sdpa", checkpointing="full"),
    Case(model="modernbert-base", documents=12.0),
    Case(model="bert-120m", compiled=True, trained=True),
    Case(model="modernbert-base", compiled=True),
    Case(model="bert-350m", compiled=True, checkpointing="full"),
    Case(model="bert-120m", compiled=True, attention="sdpa", dropout=0.1),
    Case(model="bert-120m", gpu="h100-sxm-80gb"),
    Case(model="bert-120m", gpu="rtx-4090-24gb"),
    Case(model="bert-350m", gpu="rtx-4090-24gb", checkpointing="full"),
    Case(model="modernbert-large", gpu="rtx-4090-24gb", checkpointing="selective"),
    Case(model="bert-350m", gpu="h200-141gb"),
    Case(model="bert-120m", gpu="h200-141gb", checkpointing="full"),
    Case(model="bert-120m", ranks=2),
    Case(model="bert-350m", ranks=2, strategy="zero1", checkpointing="full"),
    Case(model="bert-120m", ranks=2, strategy="fsdp2"),
    Case(model="bert-350m", ranks=2, strategy="fsdp2", checkpointing="full"),
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Probe and train what is asked for, print and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cuda_memory", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    parser.add_argument("--only", metavar="TEXT", help="configurations whose names hold this text")
    parser.add_argument("--inside", metavar="CASE", help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.inside is not None:
        case = Case(**json.loads(options.inside))
        print(json.dumps(probed(case) if options.rows is None else trained(case, options.rows)))
        return 0
    found: dict[str, Any] = {}
    for case in (case for case in CASES if (options.only or "") in case.name):
        found[case.name] = on_pretended_gpus(case)
        sys.stderr.write(f"{case.name}: {json.dumps(found[case.name])}\n")
        if options.json:
            _write(options.json, found)
    print(text_table(_HEAD, _rows(found), align="lrrrrrr"))
    print(bars.lines(bars_of(found)))
    return bars.exit_code(bars_of(found))


def on_pretended_gpus(case: Case) -> dict[str, Any]:
    """Run one configuration where torch sees pretended GPUs."""
    from tests.nullgpu.environment import make
    from tests.nullgpu.machine import Machine

    with tempfile.TemporaryDirectory() as folder:
        machine = Machine(environment=make(), folder=Path(folder), devices=case.ranks, name=case.gpu)

        def inside(*words: str) -> dict[str, Any]:
            told = json.dumps(asdict(case))
            ended = machine.run("-m", "benchmarks.cuda_memory", "--inside", told, *words, timeout_s=3600)
            answer: dict[str, Any] = json.loads(ended.out.strip().splitlines()[-1]) if not ended.code else {}
            return answer or {"error": str(ended)[-2000:]}

        found = inside()
        if case.trained and (largest := found.get("largest_rows")):
            found["chosen_rows"] = rows_with_headroom(largest, HEADROOM_SHARE)
            found["trained"] = inside("--rows", str(found["chosen_rows"]))
    return found


def probed(case: Case) -> dict[str, Any]:
    """Predict a configuration and find its largest micro-batch."""
    request, expected = _request(case)
    started_s = time.monotonic()
    with ForkServerMachine() as machine, tempfile.TemporaryDirectory() as folder:
        machine.start()
        runner = TrialRunner(machine=machine, ledger=Ledger(Path(folder), "memory"), site="", clock=SystemClock())
        search = Search(request=request, runner=runner)
        crashed = None
        try:
            search.predict()
            search.find()
        except AutotuneError as error:
            crashed = error.message[-600:]
        state = bracket(search.tried)
        found: dict[str, Any] = {
            "gpu": case.gpu,
            "compiled": case.compiled,
            "predicted_rows": search.predicted_rows(),
            "largest_rows": state.feasible_max,
            "proven": state.closed,
            "trials": [[one.rows, one.fits] for one in search.tried],
            "not_traced": search.not_traced,
            "crashed": crashed,
        }
        for done in runner.finished:
            if (
                isinstance(done.outcome, Measured)
                and done.trial.measured["config"]["micro_batch_rows"] == state.feasible_max
            ):
                outside = done.outcome.figures["outside_allocator_bytes"]
                found["allocator_peak_bytes"] = done.outcome.figures["peak_bytes"] - outside
                if search.traced_bytes is not None:
                    traced = search.traced_bytes(state.feasible_max)
                    found["predicted_peak_bytes"] = round(traced) - expected.usual.outside_bytes
    return found | {"seconds": round(time.monotonic() - started_s, 1)}


def _request(case: Case) -> tuple[ProbeRequest, Expected]:
    """What is probed, under all of the GPU's memory, and what is assumed to lie outside the allocator."""
    monitor = NvmlMonitor()
    gpu = monitor.devices()[0]
    used = monitor.used_bytes(gpu.uuid)
    monitor.close()
    assert isinstance(used, int)
    expected = expected_on_gpu(gpu.compute_capability, case.ranks, find_card(case.gpu).usable_bytes)
    request = ProbeRequest(
        settings=_settings(case.model),
        manifest=synthetic_manifest(VOCAB_SIZE),
        seq_length_tokens=case.width,
        layout=case.layout,
        attention_dropout=case.dropout,
        precision=case.precision,
        device="cuda",
        memory_budget_bytes=gpu.total_bytes - used,
        headroom_share=0.0,
        max_rows=MAX_ROWS,
        trial_timeout_s=600.0,
        device_used_before_bytes=[used] * case.ranks if case.ranks > 1 else used,
        checkpointing=case.checkpointing,
        attention=case.attention,
        head=case.head,
        compile_layers=case.compiled,
        strategy=case.strategy,
        local_ranks=case.ranks,
        micro_batches=case.micro_batches,
        documents_per_row=case.documents,
        expected=expected,
    )
    return request, expected


def trained(case: Case, rows: int) -> dict[str, Any]:
    """Take steps on packed sequences of real lengths; return how often the allocator had to try again."""
    import torch

    from trainer.batch import make_plan
    from trainer.build import build_training
    from trainer.dataset import TokenDataset
    from trainer.feed import MicroBatchSource, micro_batch_plans
    from trainer.parallel import join_ranks

    config = step_config(_request(case)[0], rows)
    with tempfile.TemporaryDirectory() as folder:
        dataset = TokenDataset.open(write_corpus(Path(folder) / "corpus", real_lengths(TRAINED_DOCUMENTS, seed=1)))
        training = build_training(config, VOCAB_SIZE, dataset.manifest.special_ids, join_ranks(config, environment={}))
        plan = make_plan(config, len(dataset), world_size=1)
        source = MicroBatchSource(dataset, config, plan)
        batches = []
        for one in micro_batch_plans(dataset, config, plan, 0, steps=TRAINED_STEPS):
            batches.append(source.__getitems__(one))
            if len(batches) == config.global_batch_rows // config.micro_batch_rows:
                training.step.run(batches, config.learning_rate)
                batches = []
    stats = torch.cuda.memory_stats()
    return {
        "steps": TRAINED_STEPS,
        "retries": int(stats["num_alloc_retries"]),
        "allocator_peak_bytes": int(stats["reserved_bytes.all.peak"]),
    }


def _settings(name: str) -> ModelSettings:
    return ModelSettings(name="roberta", config=ROBERTA) if name == "roberta" else model_settings(name)


def bars_of(found: dict[str, Any]) -> list[Bar]:
    """Compare figures with their bars."""
    whole = [one for one in found.values() if one.get("largest_rows")]
    errors = {True: _errors(whole, compiled=True), False: _errors(whole, compiled=False)}
    rows = {
        compiled: [_rows_off(one) for one in whole if one["compiled"] is compiled and one["predicted_rows"]]
        for compiled in (True, False)
    }
    shares = {compiled: [share for _, share in rows[compiled]] for compiled in rows}
    near = [off <= 1 for off, _ in (*rows[False], *rows[True])]
    trials = [len(one["trials"]) for one in whole]
    bad = ("error", "crashed", "not_traced")
    broken = sum(any(one.get(key) for key in bad) or not one.get("proven") for one in found.values())
    again = [one["trained"].get("retries") for one in whole if "trained" in one]
    retries = sum(again) if again and None not in again else None
    return [
        Bar(name="peak_error_median_%", figure=_median(errors[False]), unit="%", bar=0.2, direction="<="),
        Bar(name="peak_error_worst_%", figure=_most(errors[False]), unit="%", bar=1.0, direction="<="),
        Bar(name="peak_error_compiled_worst_%", figure=_most(errors[True]), unit="%", bar=3.0, direction="<="),
        Bar(
            name="largest_exact_or_one_off_%", figure=100 * sum(near) / len(near) if near else None, unit="%", bar=90,
            direction=">=",
        ),
        Bar(name="largest_error_worst_%", figure=_most(shares[False]), unit="%", bar=1.0, direction="<="),
        Bar(name="largest_error_compiled_worst_%", figure=_most(shares[True]), unit="%", bar=3.0, direction="<="),
        Bar(name="trials_median", figure=_median(trials), unit="trials", bar=3, direction="<="),
        Bar(name="trials_worst", figure=_most(trials), unit="trials", bar=6, direction="<="),
        Bar(name="searches_without_an_answer", figure=broken, unit="searches", bar=0, direction="<="),
        Bar(name="retries_in_training", figure=retries, unit="retries", bar=0, direction="<="),
    ]  # fmt: skip


def _errors(found: list[dict[str, Any]], *, compiled: bool) -> list[float]:
    return [
        100 * abs(one["predicted_peak_bytes"] / one["allocator_peak_bytes"] - 1)
        for one in found
        if one["compiled"] is compiled and "predicted_peak_bytes" in one
    ]


def _rows_off(one: dict[str, Any]) -> tuple[int, float]:
    off = abs(one["predicted_rows"] - one["largest_rows"])
    return off, 100 * off / one["largest_rows"] if off > 1 else 0.0


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _most(values: Sequence[float]) -> float | None:
    return max(values, default=None)


_HEAD = ("configuration", "predicted", "largest", "its peak", "predicted peak", "trials", "retries in training")


def _rows(found: Mapping[str, Any]) -> list[list[str]]:
    """One for each configuration."""
    return [
        [
            name,
            *(str(one.get(key)) for key in ("predicted_rows", "largest_rows")),
            f"{one['allocator_peak_bytes'] / 1e9:.2f} GB",
            f"{one['predicted_peak_bytes'] / one['allocator_peak_bytes'] - 1:+.3%}",
            str(len(one["trials"])),
            str(one.get("trained", {}).get("retries", "")),
        ]
        if "predicted_peak_bytes" in one
        else [name, "failed", *[""] * (len(_HEAD) - 2)]
        for name, one in found.items()
    ]


def _write(path: Path, found: dict[str, Any]) -> None:
    content = {"evidence": "allocator", "bars": [bar.to_json() for bar in bars_of(found)], "configurations": found}
    write_atomically(path, json_rows(content))


if __name__ == "__main__":
    sys.exit(main())
