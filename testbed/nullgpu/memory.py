"""Predict and find the largest micro-batch on pretended GPUs, and train it there.

``python -m testbed.nullgpu.memory CASE [ROWS]`` is the program that runs there.
"""

import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autotune.base.clock import SystemClock
from autotune.base.defaults import HEADROOM_SHARE
from autotune.errors import AutotuneError
from autotune.machine.gpu_models import find_gpu_model
from autotune.memory.decide.batch_search import bracket
from autotune.memory.decide.overheads import OverheadsRange, overheads_on_gpu
from autotune.memory.size_search import SizeSearch
from autotune.profiles.decide.micro_batch import with_headroom
from autotune.subjects.mlm.memory.probe import MlmProbe, MlmProbeRequest
from autotune.trials.fork_server import ForkServerMachine
from autotune.trials.outcomes import Measured
from autotune.trials.runner import TrialRunner
from autotune.trials.trial_log import TrialLog
from testbed.corpora import real_lengths, synthetic_manifest, write_corpus
from testbed.programs import FLASH_ATTENTION_4
from trainer.data.sequence_statistics import SequenceStatistics
from trainer.formats.batch_split import Layout
from trainer.formats.nvml import NvmlMonitor
from trainer.formats.presets import model_settings
from trainer.formats.train_config import (
    Attention,
    Checkpointing,
    Head,
    ModelSettings,
    ParallelSettings,
    Precision,
    Strategy,
    TrainConfig,
)

ROOT = Path(__file__).parents[2]
VOCAB_SIZE = 30_522
HEAD_DIMENSIONS = 64
"""Dimensions of a head of all models here."""
TRAINED_STEPS, TRAINED_DOCUMENTS = 300, 60_000
MAX_MICRO_BATCH_SIZE = 16_384
ROBERTA = {
    "model_type": "roberta",
    "num_hidden_layers": 12,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 514,
    "type_vocab_size": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One configuration."""

    model: str
    gpu: str = "h100-nvl-94gb"
    precision: Precision = "bf16"
    attention: Attention = "varlen"
    dropout: float = 0.0
    activation_checkpointing: Checkpointing = "none"
    compiled: bool = False
    fused_norms: bool = False
    gelu_epilogues: bool = False
    layout: Layout = "packed"
    mlm_head: Head = "sparse"
    width: int = 512
    documents: float = 4.0
    micro_batches: int = 2
    ranks: int = 1
    strategy: Strategy = "ddp"
    trained: bool = False
    """Whether it is also trained."""

    @property
    def name(self) -> str:
        """Settings by which the case differs from the usual one."""
        usual = Case(model=self.model)
        changed = {
            key: value
            for key, value in asdict(self).items()
            if value != getattr(usual, key)
        }
        words = [
            f"{key} {value}"
            for key, value in changed.items()
            if key not in {"model", "trained"}
        ]
        return ", ".join([self.model, *words])


def on_pretended_gpus(case: Case) -> dict[str, Any]:
    """Run one configuration where torch sees pretended GPUs."""
    from testbed.nullgpu.environment import make
    from testbed.nullgpu.machine import Machine

    with tempfile.TemporaryDirectory() as folder:
        machine = Machine(
            environment=make(),
            folder=Path(folder),
            devices=case.ranks,
            name=case.gpu,
            variables={
                "PYTHONPATH": f"{ROOT}:{FLASH_ATTENTION_4}",
                "XDG_CACHE_HOME": folder,
            }
            if case.attention == "fa4"
            else {},
        )

        def inside(*words: str) -> dict[str, Any]:
            case_json = json.dumps(asdict(case))
            ended = machine.run(
                "-m", "testbed.nullgpu.memory", case_json, *words, timeout_s=3600
            )
            answer: dict[str, Any] = (
                json.loads(ended.out.strip().splitlines()[-1]) if not ended.code else {}
            )
            return answer or {"error": str(ended)[-2000:]}

        if case.attention == "fa4":
            passing = f"from {__name__} import pass_flash_attention_check as passing"
            machine.run("-c", f"{passing}; passing({HEAD_DIMENSIONS})")
        result = inside()
        if case.trained and (largest := result.get("largest_micro_batch_size")):
            result["chosen_rows"] = with_headroom(largest, HEADROOM_SHARE)
            result["trained"] = inside(str(result["chosen_rows"]))
    return result


def pass_flash_attention_check(head_dimensions: int) -> None:
    """Note that this machine has passed the check, which compares values."""
    import torch

    from trainer.model.flash_attention_check import file_of_passed_check

    passed = file_of_passed_check(torch.device("cuda"), head_dimensions)
    passed.parent.mkdir(parents=True, exist_ok=True)
    passed.touch()


def probed(case: Case) -> dict[str, Any]:
    """Predict a configuration and find its largest micro-batch."""
    probe, overheads = _request(case)
    started_s = time.monotonic()
    with (
        ForkServerMachine(device="cuda") as machine,
        tempfile.TemporaryDirectory() as folder,
    ):
        machine.start()
        runner = TrialRunner(
            machine=machine,
            trial_log=TrialLog(Path(folder), "memory"),
            site="",
            clock=SystemClock(),
        )
        search = SizeSearch(
            probe=probe.size_probe(), runner=runner, host_available_bytes=0
        )
        crashed = None
        try:
            search.predict()
            search.find()
        except AutotuneError as error:
            crashed = error.message[-600:]
        state = bracket(search.tried)
        result: dict[str, Any] = {
            "gpu": case.gpu,
            "compiled": case.compiled,
            "predicted_rows": (
                None
                if search.estimate is None
                else search.estimate.max_micro_batch_size
            ),
            "largest_micro_batch_size": state.feasible_max,
            "verified": state.infeasible_min == state.feasible_max + 1,
            "trials": [[trial.micro_batch_size, trial.fits] for trial in search.tried],
            "not_traced": search.not_traced,
            "crashed": crashed,
        }
        for finished in runner.finished:
            if (
                isinstance(finished.outcome, Measured)
                and finished.trial.measured["size"] == state.feasible_max
            ):
                outside = finished.outcome.figures["non_pytorch_bytes"]
                result["allocator_peak_bytes"] = (
                    finished.outcome.figures["peak_bytes"] - outside
                )
                if search.prediction is not None:
                    traced = round(search.prediction.peak_bytes(state.feasible_max))
                    result["predicted_peak_bytes"] = (
                        traced - overheads.usual.non_pytorch_bytes
                    )
    return result | {"seconds": round(time.monotonic() - started_s, 1)}


def _request(case: Case) -> tuple[MlmProbe, OverheadsRange]:
    """Return the request for a probe, and the assumed non-PyTorch memory.

    The probe may use all of the GPU's memory.
    """
    monitor = NvmlMonitor()
    gpu = monitor.devices()[0]
    used = monitor.used_bytes(gpu.uuid)
    monitor.close()
    assert isinstance(used, int)
    overheads = overheads_on_gpu(
        gpu.compute_capability, case.ranks, find_gpu_model(case.gpu).usable_bytes
    )
    config = TrainConfig(
        model=_settings(case.model),
        seq_length_tokens=case.width,
        layout=case.layout,
        attention_dropout=case.dropout,
        precision=case.precision,
        device="cuda",
        activation_checkpointing=case.activation_checkpointing,
        attention=case.attention,
        mlm_head=case.mlm_head,
        compile=case.compiled,
        fused_norms=case.fused_norms,
        gelu_epilogues=case.gelu_epilogues,
        parallel=ParallelSettings(strategy=case.strategy),
    )
    request = MlmProbeRequest(
        config=config,
        data=Path(),
        reports=Path(),
        accumulate=case.micro_batches > 1,
        headroom_share=0.0,
        max_size=MAX_MICRO_BATCH_SIZE,
    )
    probe = MlmProbe(
        request=request,
        config=config,
        manifest=synthetic_manifest(VOCAB_SIZE),
        memory_budget_bytes=gpu.total_bytes - used,
        device_used_before_bytes=[used] * case.ranks,
        local_ranks=case.ranks,
        sequence_stats=SequenceStatistics(
            mean_non_padding_tokens=case.width,
            mean_samples=1.0,
            max_mean_samples=case.documents,
        ),
        overheads=overheads,
    )
    return probe, overheads


def trained(case: Case, rows: int) -> dict[str, Any]:
    """Take steps on packed sequences of real lengths.

    Returns:
        The number of times that the allocator had to try again.
    """
    import torch

    from trainer.build import build_training
    from trainer.checkpoint.tensors import make_optimizer_state
    from trainer.data.batch_plan import make_plan
    from trainer.data.dataset import TokenDataset
    from trainer.data.loader import micro_batch_plans
    from trainer.data.micro_batch_source import MicroBatchSource
    from trainer.runtime.ranks import join_ranks, warm_up_libraries

    probe, _ = _request(case)
    config = probe.subject.chosen({"micro_batch_size": rows, **probe.fit_choice})
    with tempfile.TemporaryDirectory() as folder:
        dataset = TokenDataset.open(
            write_corpus(
                Path(folder) / "corpus", real_lengths(TRAINED_DOCUMENTS, seed=1)
            )
        )
        ranks = join_ranks(config, environment={})
        warm_up_libraries(ranks)  # as a training begins
        training = build_training(
            config, VOCAB_SIZE, dataset.manifest.special_ids, ranks
        )
        plan = make_plan(config, len(dataset), world_size=1)
        source = MicroBatchSource(dataset, config, plan)
        make_optimizer_state(training)
        plans = list(micro_batch_plans(dataset, config, plan, 0, steps=TRAINED_STEPS))
        first = source.__getitems__(plans[0])
        training.module.fixed_sizes.expect_documents(first)
        training.step.rehearse(first)
        batches = []
        for batch_plan in plans:
            batches.append(source.__getitems__(batch_plan))
            if len(batches) == config.global_batch_size // config.micro_batch_size:
                training.step.run(batches, config.learning_rate)
                batches = []
    stats = torch.cuda.memory_stats()
    return {
        "steps": TRAINED_STEPS,
        "retries": int(stats["num_alloc_retries"]),
        "allocator_peak_bytes": int(stats["reserved_bytes.all.peak"]),
    }


def _settings(name: str) -> ModelSettings:
    return (
        ModelSettings(name="roberta", config=ROBERTA)
        if name == "roberta"
        else model_settings(name)
    )


if __name__ == "__main__":
    CASE = Case(**json.loads(sys.argv[1]))
    print(
        json.dumps(
            probed(CASE) if len(sys.argv) < 3 else trained(CASE, int(sys.argv[2]))
        )
    )
