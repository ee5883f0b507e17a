"""``python -m benchmarks.speed --json FILE``: predicted and measured step times.

Predictions are compared with published times, and with this machine's. Published
figures are of other people's trainers on A100 and H100, encoders first. Each step is
traced with the published shape, micro-batch, precision and kind of attention, and
predicted from the GPU's data sheet; none of the figures was used to fit the constants.
Left out were figures of trainers whose kernels are hand-fused, whose weights are in 16
bits, or whose data is not padded to the stated length.

Steps of this trainer that ``benchmarks.gpu_kernels`` measured are predicted too; those
in float8 gave a constant. On this machine, constants are measured first, as ``autotune
doctor --measure`` does; then steps of the trainer are predicted and measured, in
interleaved rounds.
"""

import contextlib
import itertools
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from autotune.base.tables import text_table
from autotune.machine.host import SystemHost
from autotune.memory.estimate import traced_work
from autotune.memory.size_probe import StepCounts, step_fields
from autotune.memory.values import StepRequest
from autotune.speed.decide import data_sheet_rates, predict_speed
from autotune.speed.measure import measure_rates
from autotune.subjects.mlm.memory.contents import DEFAULT_SPECIAL_IDS
from autotune.subjects.mlm.memory.trace_request import TraceRequest
from autotune.subjects.mlm.subject import MlmSubject
from autotune.trials.fork_server import ForkServerMachine
from autotune.trials.outcomes import Measured
from benchmarks.bars import Direction, bars_of, finish, measuring, parser, run
from testbed.programs import TORCHAO, CannotMeasure
from trainer.formats.events import utc_now
from trainer.formats.presets import model_settings
from trainer.formats.train_config import ModelSettings, TrainConfig

BARS: dict[str, tuple[str, Direction, float]] = {
    "published_figures": ("figures", ">=", 8),
    "published_error_median_%": ("%", "<=", 25),
    "cpu_configurations": ("configurations", ">=", 12),
    "cpu_error_median_%": ("%", "<=", 15),
    "cpu_error_worst_%": ("%", "<=", 30),
    "cpu_pairs_in_order_%": ("%", ">=", 90),
}
DIFFER_SHARE = 0.1
TIMEOUT_S = 400.0
MEASURED = Path("reports/gpu")


@dataclass(frozen=True, kw_only=True)
class Published:
    """A published throughput, with the settings of its step."""

    name: str
    gpu: str
    tokens_per_s: float
    """Per GPU, padding included."""
    source: str
    layers: int
    hidden: int
    heads: int
    intermediate: int
    seq_length: int
    micro_batch: int
    accumulation: int = 1
    vocab_size: int = 30_522
    model_type: str = "bert"
    precision: str = "bf16"
    """``bf16`` stands for fp16 as well."""
    compile: bool = False
    attention: str = "explicit"
    """``explicit``: separate matmuls and softmax; ``flash``."""
    causal: bool = False
    predicted_share: float | None = None
    """Share of positions at which the head is computed; None for all."""
    dropout: float = 0.1

    def config(self) -> TrainConfig:
        """Return the settings of the trainer that come closest."""
        shape: dict[str, Any] = {
            "model_type": self.model_type,
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": self.seq_length,
        }
        flash = self.attention == "flash"
        if self.model_type == "bert":
            shape |= {
                "hidden_dropout_prob": self.dropout,
                "attention_probs_dropout_prob": 0.0 if flash else self.dropout,
            }
        dense = self.predicted_share is None
        return TrainConfig.model_validate(
            {
                "model": ModelSettings(name="published", config=shape),
                "device": "cuda",
                "precision": self.precision,
                "seq_length_tokens": self.seq_length,
                "layout": "packed" if flash else "padded",
                "attention": "varlen" if flash else "sdpa",
                "compile": self.compile,
                "mlm_head": "dense" if dense else "sparse",
                "last_layer": "dense",
                **({} if dense else {"masking_probability": self.predicted_share}),
            }
        )


_DLE = "NVIDIA DeepLearningExamples, PyTorch BERT README at a07d20a1"
_LAMBDA = "lambdal/deeplearning-benchmark at aa5addb6, SQuAD"
_FLAGPERF = "FlagOpen/FlagPerf at 1b5a0303, training/nvidia/bert_hf-pytorch"
_FOUNDRY = "mosaicml/llm-foundry at 8c8dd48f, scripts/train/benchmarking"
_MODDED = "KellerJordan/modded-nanogpt at f411b3d3, records/track_1_short"
_A100, _A100_40, _H100 = (
    "NVIDIA A100-SXM4-80GB",
    "NVIDIA A100-SXM4-40GB",
    "NVIDIA H100 80GB HBM3",
)


def _large(**more: Any) -> Published:
    return Published(
        **{"layers": 24, "hidden": 1024, "heads": 16, "intermediate": 4096} | more
    )


def _decoder(shape: tuple[int, int, int, int], **more: Any) -> Published:
    named: dict[str, Any] = dict(
        zip(("layers", "hidden", "heads", "intermediate"), shape, strict=True)
    )
    return Published(
        **{
            **named,
            "causal": True,
            "attention": "flash",
            "dropout": 0.0,
            "vocab_size": 50_368,
            **more,
        }
    )


_125M, _350M, _760M = (12, 768, 12, 3072), (24, 1024, 16, 4096), (24, 1536, 12, 6144)
_1B = (24, 2048, 16, 8192)
PUBLISHED = (
    _large(
        name="BERT-large, NVIDIA, fp16",
        gpu=_A100,
        tokens_per_s=74_240,
        source=_DLE,
        seq_length=128,
        micro_batch=256,
        accumulation=32,
        predicted_share=0.15,
    ),
    _large(
        name="BERT-large, NVIDIA, TF32",
        gpu=_A100,
        tokens_per_s=40_576,
        source=_DLE,
        seq_length=128,
        micro_batch=128,
        accumulation=64,
        predicted_share=0.15,
        precision="fp32",
    ),
    _large(
        name="BERT-large, MosaicML",
        gpu=_A100,
        tokens_per_s=35_962,
        seq_length=512,
        micro_batch=56,
        dropout=0.0,
        source="MLPerf Training 2.1 results at 158189d4, MosaicML 8xA100_80GB-baseline",
    ),
    _large(
        name="BERT-large, FlagPerf, fp16",
        gpu=_A100_40,
        tokens_per_s=26_291,
        source=_FLAGPERF,
        seq_length=512,
        micro_batch=20,
    ),
    _large(
        name="BERT-large, FlagPerf, TF32",
        gpu=_A100_40,
        tokens_per_s=21_555,
        source=_FLAGPERF,
        seq_length=512,
        micro_batch=12,
        precision="fp32",
    ),
    Published(
        name="BERT-base, MosaicML",
        gpu=_A100,
        tokens_per_s=110_810,
        layers=12,
        hidden=768,
        heads=12,
        intermediate=3072,
        seq_length=128,
        micro_batch=128,
        accumulation=4,
        source="mosaicml/examples at daddaeff, benchmarks/bert",
    ),
    _large(
        name="BERT-large, SQuAD, NVIDIA",
        gpu=_A100,
        tokens_per_s=42_432,
        source=_DLE,
        seq_length=384,
        micro_batch=32,
        predicted_share=0.001,
    ),
    _large(
        name="BERT-large, SQuAD, Lambda",
        gpu=_A100,
        tokens_per_s=58_696,
        source=_LAMBDA,
        seq_length=384,
        micro_batch=112,
        predicted_share=0.001,
    ),
    Published(
        name="BERT-base, SQuAD, Lambda",
        gpu=_A100,
        tokens_per_s=170_387,
        source=_LAMBDA,
        layers=12,
        hidden=768,
        heads=12,
        intermediate=3072,
        seq_length=384,
        micro_batch=320,
        predicted_share=0.001,
    ),
    _large(
        name="BERT-large, SQuAD, Lambda",
        gpu=_H100,
        tokens_per_s=119_441,
        source=_LAMBDA,
        seq_length=384,
        micro_batch=112,
        predicted_share=0.001,
    ),
    Published(
        name="BERT-base, SQuAD, Lambda",
        gpu=_H100,
        tokens_per_s=336_818,
        source=_LAMBDA,
        layers=12,
        hidden=768,
        heads=12,
        intermediate=3072,
        seq_length=384,
        micro_batch=320,
        predicted_share=0.001,
    ),
    Published(
        name="ModernBERT-base",
        gpu=_H100,
        tokens_per_s=312_336,
        source="arXiv 2412.13663, table 3",
        layers=22,
        hidden=768,
        heads=12,
        intermediate=1152,
        model_type="modernbert",
        seq_length=1024,
        micro_batch=96,
        accumulation=6,
        vocab_size=50_368,
        compile=True,
        attention="flash",
        predicted_share=0.3,
    ),
    Published(
        name="ModernBERT-large",
        gpu=_H100,
        tokens_per_s=141_978,
        source="arXiv 2412.13663, table 3",
        layers=28,
        hidden=1024,
        heads=16,
        intermediate=2624,
        model_type="modernbert",
        seq_length=1024,
        micro_batch=56,
        accumulation=11,
        vocab_size=50_368,
        compile=True,
        attention="flash",
        predicted_share=0.3,
    ),
    _decoder(
        _125M,
        name="MPT-125m",
        gpu=_A100,
        tokens_per_s=165_681,
        source=_FOUNDRY,
        seq_length=512,
        micro_batch=128,
        accumulation=2,
    ),
    _decoder(
        _125M,
        name="MPT-125m",
        gpu=_A100,
        tokens_per_s=141_737,
        source=_FOUNDRY,
        seq_length=2048,
        micro_batch=32,
        accumulation=2,
    ),
    _decoder(
        _350M,
        name="MPT-350m",
        gpu=_A100,
        tokens_per_s=69_330,
        source=_FOUNDRY,
        seq_length=512,
        micro_batch=128,
        accumulation=2,
    ),
    _decoder(
        _350M,
        name="MPT-350m",
        gpu=_A100_40,
        tokens_per_s=66_284,
        source=_FOUNDRY,
        seq_length=512,
        micro_batch=64,
        accumulation=4,
    ),
    _decoder(
        _760M,
        name="MPT-760m",
        gpu=_H100,
        tokens_per_s=83_749,
        source=_FOUNDRY,
        seq_length=512,
        micro_batch=96,
        accumulation=2,
    ),
    _decoder(
        _1B,
        name="MPT-1b",
        gpu=_H100,
        tokens_per_s=52_275,
        source=_FOUNDRY,
        seq_length=512,
        micro_batch=56,
        accumulation=4,
    ),
    _decoder(
        (12, 768, 6, 3072),
        name="GPT-2 124M, modded-nanogpt",
        gpu=_H100,
        tokens_per_s=472_809,
        source=_MODDED,
        seq_length=1024,
        micro_batch=64,
        vocab_size=50_304,
        compile=True,
    ),
    _decoder(
        (52, 1536, 12, 6144),
        name="GPT 1.5B, modded-nanogpt",
        gpu=_H100,
        tokens_per_s=36_065,
        source=_MODDED,
        seq_length=1024,
        micro_batch=10,
        accumulation=6,
        vocab_size=50_304,
        compile=True,
    ),
)


_TINY = "docs/assets/modernbert-tiny/config.json"
CPU_CONFIGURATIONS: Mapping[str, Mapping[str, Any]] = {
    "bert-mini": {},
    "bert-mini, 64 sequences": {"micro_batch_size": 64},
    "bert-mini, 512 tokens": {"micro_batch_size": 8, "seq_length_tokens": 512},
    "bert-mini, 4 sequences": {"micro_batch_size": 4},
    "bert-mini, dense head": {"mlm_head": "dense"},
    "bert-mini, dense last layer": {"last_layer": "dense"},
    "bert-mini, attention dropout": {"attention_dropout": 0.1},
    "bert-mini, attention dropout, 512 tokens": {
        "attention_dropout": 0.1,
        "micro_batch_size": 8,
        "seq_length_tokens": 512,
    },
    "bert-mini, full checkpointing": {"activation_checkpointing": "full"},
    "bert-mini, 4 micro-batches": {"micro_batches": 4},
    "bert-mini, large vocabulary": {"vocab_size": 32_000},
    "bert-small": {"model": "bert-small", "micro_batch_size": 8},
    "bert-small, 512 tokens": {
        "model": "bert-small",
        "micro_batch_size": 4,
        "seq_length_tokens": 512,
    },
    "modernbert-tiny": {"model": _TINY},
    "modernbert-tiny, 64 sequences": {"model": _TINY, "micro_batch_size": 64},
    "modernbert-tiny, 512 tokens": {
        "model": _TINY,
        "micro_batch_size": 8,
        "seq_length_tokens": 512,
    },
}


@measuring
def main(arguments: Sequence[str] | None = None) -> int:
    """Predict, measure, print both tables and the bars, and return the exit code."""
    options_of = parser(
        "speed", "Predicted step times beside published and measured ones."
    )
    options_of.add_argument(
        "--only", choices=("published", "gpu", "cpu"), help="one of the comparisons"
    )
    options_of.add_argument(
        "--rounds",
        type=int,
        default=3,
        help="interleaved rounds of measurements on this machine",
    )
    options = options_of.parse_args(arguments)
    content: dict[str, Any] = {}
    figures: dict[str, float | None] = {}
    shown = []
    if options.only in (None, "published"):
        rows = [compare_published(published) for published in PUBLISHED]
        content["published"] = rows
        errors = [abs(row["error_%"]) for row in rows]
        figures |= {
            "published_figures": len(rows),
            "published_error_median_%": statistics.median(errors),
        }
        shown.append(
            _table(
                rows,
                (
                    "name",
                    "gpu",
                    "published_tokens_per_s",
                    "predicted_tokens_per_s",
                    "error_%",
                ),
            )
        )
    if options.only in (None, "gpu"):
        content["gpu"] = rows = list(compare_gpu())
        names = (
            "name",
            "measured_s",
            "predicted_s",
            "error_%",
            "kernels_s",
            "predicted_kernels_s",
            "kernels_error_%",
        )
        shown.append(_table(rows, names))
    if options.only in (None, "cpu"):
        content["cpu"], content["rates"] = compare_cpu(options.rounds)
        rows = content["cpu"]
        errors = [abs(row["error_%"]) for row in rows]
        order = rank_order_share(
            [row["predicted_s"] for row in rows],
            [row["measured_s"] for row in rows],
            differ_share=DIFFER_SHARE,
        )
        figures |= {
            "cpu_configurations": len(rows),
            "cpu_error_median_%": statistics.median(errors),
            "cpu_error_worst_%": max(errors),
            "cpu_pairs_in_order_%": 100 * order,
        }
        shown.append(_table(rows, ("name", "measured_s", "predicted_s", "error_%")))
    return finish(options.json, bars_of(BARS, figures), content, "\n\n".join(shown))


def compare_published(published: Published) -> dict[str, Any]:
    """Return the published and the predicted tokens/s of one figure."""
    from autotune.subjects.mlm.jobs.trace import trace_steps

    rates = data_sheet_rates(published.gpu)
    assert rates is not None
    config = published.config()
    seconds = []
    for micro_batches in (1, 2) if published.accumulation > 1 else (1,):
        sizes = {
            "micro_batch_size": published.micro_batch,
            "global_batch_size": published.micro_batch * micro_batches,
        }
        with (
            _explicit_attention()
            if published.attention == "explicit"
            else contextlib.nullcontext()
        ):
            # A causal query sees half of the positions, like one in documents of half
            # the length.
            traced = trace_steps(
                config.model_copy(update=sizes),
                published.vocab_size,
                DEFAULT_SPECIAL_IDS,
                documents_per_sequence=2.0 if published.causal else 1.0,
            )
        seconds.append(predict_speed(traced.trace.work, rates, config).step_s.value)
    further = seconds[1] - seconds[0] if len(seconds) > 1 else 0.0
    step_s = seconds[0] + (published.accumulation - 1) * further
    predicted = (
        published.accumulation * published.micro_batch * published.seq_length / step_s
    )
    sys.stderr.write(
        f"{published.name} {published.gpu}: {predicted / published.tokens_per_s:.2f}\n"
    )
    return {
        **asdict(published),
        "published_tokens_per_s": published.tokens_per_s,
        "predicted_tokens_per_s": predicted,
        "error_%": 100 * (predicted / published.tokens_per_s - 1),
    }


def compare_gpu() -> Iterator[dict[str, Any]]:
    """Yield predicted and measured times of steps on GPUs, and of their kernels.

    The times of kernels leave out what the host takes longer.
    """
    from autotune.subjects.mlm.jobs.trace import trace_steps
    from benchmarks.gpu.step_settings import step_config
    from benchmarks.gpu_kernels import DOCUMENTS, VOCAB_SIZE

    sys.path.append(str(TORCHAO))
    for path in sorted(MEASURED.glob("*/*/steps.json")):
        measured = json.loads(path.read_text())
        rates = data_sheet_rates(measured["gpu"])
        assert rates is not None
        for name, step in measured["steps"].items():
            config = step_config(
                step["model"], step["micro_batch_size"], step["settings"]
            )
            traced = trace_steps(
                config,
                VOCAB_SIZE,
                DEFAULT_SPECIAL_IDS,
                documents_per_sequence=DOCUMENTS,
            )
            speed = predict_speed(traced.trace.work, rates, config)
            predicted_s = speed.step_s.value
            row = {
                key: step[key]
                for key in ("kernels_s", "launched_s", "peak_bytes", "model_flops")
            }
            yield row | {
                "name": name,
                "gpu": measured["gpu"],
                "torch": measured["torch"],
                "measured_s": step["step_s"],
                "predicted_s": predicted_s,
                "predicted_kernels_s": predicted_s - speed.parts_s["host"],
                "error_%": 100 * (predicted_s / step["step_s"] - 1),
                "kernels_error_%": (
                    100
                    * ((predicted_s - speed.parts_s["host"]) / step["kernels_s"] - 1)
                ),
            }


def compare_cpu(rounds: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return predicted and measured step times of the trainer on this machine.

    The machine's constants are returned as well.
    """
    requests = {
        name: _settings(**changes) for name, changes in CPU_CONFIGURATIONS.items()
    }
    measured: dict[str, list[float]] = {name: [] for name in requests}
    predicted = {}
    with ForkServerMachine() as machine:
        machine.start()
        cpu = SystemHost().facts(()).cpu_model or "cpu"
        rates = measure_rates(machine, "cpu", cpu, when_utc=utc_now())
        for name, (config, more) in requests.items():
            micro_batches = config.global_batch_size // config.micro_batch_size
            request = TraceRequest(
                config=config, micro_batches=micro_batches, ranks=1, **more
            )
            work = traced_work(request, machine, config.micro_batch_size)
            predicted[name] = predict_speed(work, rates, config).step_s.value
        for _, (name, (config, more)) in itertools.product(
            range(rounds), requests.items()
        ):
            subject = MlmSubject(config=config, **more)
            step = StepRequest(
                **step_fields(
                    subject,
                    {"micro_batch_size": config.micro_batch_size},
                    StepCounts(warmup=2, timed=5),
                    device="cpu",
                    local_ranks=1,
                ),
                memory_budget_bytes=None,
            )
            outcome = machine.run(step.trial(timeout_s=TIMEOUT_S, limit_s=TIMEOUT_S))
            if not isinstance(outcome, Measured):
                raise CannotMeasure(f"{name}: {outcome}")
            measured[name].append(statistics.median(outcome.figures["step_s"]))
            sys.stderr.write(
                f"{name}: {measured[name][-1]:.3f} s, predicted"
                f" {predicted[name]:.3f} s\n"
            )
    rows_found = [
        {
            "name": name,
            "measured_s": (true_s := statistics.median(measured[name])),
            "measured_rounds_s": measured[name],
            "predicted_s": predicted[name],
            "error_%": 100 * (predicted[name] / true_s - 1),
        }
        for name in requests
    ]
    return rows_found, rates.model_dump(mode="json")


def _settings(
    model: str = "bert-mini",
    vocab_size: int = 8192,
    micro_batches: int = 1,
    **changes: Any,
) -> tuple[TrainConfig, dict[str, Any]]:
    """Return the trainer's settings, and what else its trials and traces ask for."""
    config = TrainConfig.model_validate(
        {
            "model": model_settings(model),
            "layout": "packed",
            "micro_batch_size": 16,
            "seq_length_tokens": 128,
        }
        | changes
    )
    config = config.model_copy(
        update={"global_batch_size": config.micro_batch_size * micro_batches}
    )
    return config, {
        "vocab_size": vocab_size,
        "special_ids": DEFAULT_SPECIAL_IDS,
        "documents_per_sequence": 2.0,
    }


@contextlib.contextmanager
def _explicit_attention() -> Iterator[None]:
    """Let a trace compute attention as matmuls and a softmax.

    There is no kernel for all of it.
    """
    import torch

    def attend(
        query: Any, key: Any, value: Any, mask: Any, dropout: float, *_: Any, **__: Any
    ) -> Any:
        scores = torch.matmul(query, key.transpose(-1, -2)) / query.shape[-1] ** 0.5
        weights = (scores if mask is None else scores + mask).softmax(-1)
        dropped = (
            torch.native_dropout(weights, dropout, True)[0] if dropout else weights
        )
        return torch.matmul(dropped.to(value.dtype), value)

    with mock.patch("autotune.memory.jobs.device_rules.attend", attend):
        yield


def _table(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    cells = [
        [
            f"{row[name]:.4g}" if isinstance(row[name], float) else str(row[name])
            for name in names
        ]
        for row in rows
    ]
    return text_table(list(names), cells)


def rank_order_share(
    predicted: Sequence[float], measured: Sequence[float], *, differ_share: float
) -> float:
    """Return the share of pairs that are predicted in the measured order.

    Pairs count that differ by more than ``differ_share`` when measured.
    """
    right = pairs = 0
    for first in range(len(measured)):
        for second in range(first + 1, len(measured)):
            slow, fast = sorted((first, second), key=lambda index: -measured[index])
            if measured[slow] > (1 + differ_share) * measured[fast]:
                pairs += 1
                right += predicted[slow] > predicted[fast]
    return right / pairs if pairs else 1.0


if __name__ == "__main__":
    run(main)
