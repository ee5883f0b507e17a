"""``python -m benchmarks.network [--json FILE]``: predicted and measured training.

The training is over a network.

* Several hosts (network namespaces, links shaped by ``tc tbf``; needs root) run the
  trainer's own DDP over gloo, at 1 Gbit/s and 200 Mbit/s. Predicted from latency,
  bandwidth, what computing loses meanwhile, and steps in which no gradient travels, all
  ranks running; steps with and without travelling gradients are interleaved, and the
  median of rounds counts.
* The choice of ``autotune network`` against the default, at the same global batch, in
  non-padding tokens/s.
* Useful nodes as predicted from two nodes, against brute force over a simulated
  cluster.
* Cases of the paper's cluster that follow from arithmetic.
"""

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotune.base.clock import SystemClock
from autotune.evidence.network import MIB, GradientSync
from autotune.network.decide.step_model import compute_of, step_time
from autotune.subjects.mlm.network.measure import NetworkRequest, NetworkTuning
from autotune.trials.job_figures import GradientSyncFigures
from autotune.trials.multirank import MultirankMachine
from autotune.trials.runner import TrialRunner
from autotune.trials.trial_log import TrialLog
from benchmarks import golden_network, useful_nodes
from benchmarks.bars import Bar, finish, measuring, parser, run
from testbed.corpora import real_lengths, write_learnable_corpus
from testbed.simulators.hosts import hosts, together
from trainer.formats.train_config import ModelSettings, TrainConfig

RATES_BITS_PER_S = (1_000_000_000, 200_000_000)
HOSTS = (2, 4)
ERROR_BARS = {2: 0.08, 4: 0.12}
GAIN_BAR, NODES_BAR = 1.8, 1
MODEL = {
    "model_type": "bert",
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
    "max_position_embeddings": 512,
}
"""Small enough that a core takes about as long for a step as 200 Mbit/s for its
gradients."""
VOCAB_SIZE, SEQ_LENGTH_TOKENS = 2048, 256
ROWS = 2
CHOICES = ((2, 64), (2, 256), (4, 64))
"""Hosts, and tokens of a rank and step. 64 are a twentieth of what hides the exchange
here: deep in what a slow network allows, where 16 bits can give a factor of two at
most."""
BARRED_TOKENS = 64
PARTS = ("hosts", "choices", "simulated")
ROUNDS = 4
STEPS = 4
SAMPLES = 8_000
PREDICTED = (
    (1, GradientSync()),
    (2, GradientSync()),
    (1, GradientSync(bucket_cap_bytes=5 * MIB)),
    (1, GradientSync(gradient_dtype="fp16")),
)
"""Micro-batches and exchanges whose steps are predicted and measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """Steps with gradients that travel, and steps without before and after."""

    before: GradientSyncFigures
    travelled: GradientSyncFigures
    after: GradientSyncFigures

    @property
    def around(self) -> GradientSyncFigures:
        """Both of these together."""
        ranks = zip(
            self.before.compute_s_by_rank, self.after.compute_s_by_rank, strict=True
        )
        return replace(
            self.before,
            step_s=self.before.step_s + self.after.step_s,
            compute_s_by_rank=tuple(before_s + after_s for before_s, after_s in ranks),
        )


@measuring
def main(arguments: Sequence[str] | None) -> int:
    """Measure, print and return the exit code."""
    options_of = parser("network", "Predicted against measured.")
    options_of.add_argument("--rounds", type=int, default=ROUNDS)
    options_of.add_argument(
        "--part",
        action="append",
        choices=PARTS,
        help="only this; the file keeps the others",
    )
    options = options_of.parse_args(arguments)
    results: dict[str, Any] = {
        "predicted": [],
        "chosen": [],
        "useful_nodes": [],
        "far": [],
    }
    if options.json is not None and options.json.is_file() and options.part:
        results |= {
            name: value
            for name, value in json.loads(options.json.read_text()).items()
            if name in results
        }
    parts = options.part or list(PARTS)
    with tempfile.TemporaryDirectory(prefix="network-") as place:
        data = corpus(Path(place) / "data")
        if "hosts" in parts:
            results["predicted"] = [
                row
                for count in HOSTS
                for rate in RATES_BITS_PER_S
                for row in _predictions(count, rate, data, Path(place), options.rounds)
            ]
        if "choices" in parts:
            results["chosen"] = [
                _choice(count, tokens, RATES_BITS_PER_S[-1], data, Path(place))
                for count, tokens in CHOICES
            ]
    if "simulated" in parts:
        results["useful_nodes"] = [case.to_json() for case in useful_nodes.run()]
        results["far"] = useful_nodes.run_far()
    results["accumulation_3_by_ddp"] = golden_network.ddp_with_accumulation_3()
    return finish(options.json, make_bars(results), results)


def make_bars(results: dict[str, Any]) -> list[Bar]:
    """Return the bars: the worst figure of each kind."""
    bars = []
    for count, limit in ERROR_BARS.items():
        errors = [
            abs(step["predicted_s"] / step["measured_s"] - 1)
            for step in results["predicted"]
            if step["hosts"] == count
        ]
        worst = max(errors, default=None)
        name = f"network_worst_step_error_{count}_hosts_share"
        bars.append(
            Bar(name=name, figure=worst, unit="share", bar=limit, direction="<=")
        )
    gains = [
        choice["gain"] or 1.0
        for choice in results["chosen"]
        if choice["tokens_per_rank_and_step"] == BARRED_TOKENS
    ]
    gain = min(gains, default=None)
    bars.append(
        Bar(
            name="network_chosen_to_default_ratio",
            figure=gain,
            unit="ratio",
            bar=GAIN_BAR,
            direction=">=",
        )
    )
    off = max(
        (abs(case["predicted"] - case["true"]) for case in results["useful_nodes"]),
        default=None,
    )
    bars.append(
        Bar(
            name="network_useful_nodes_off_count",
            figure=off,
            unit="count",
            bar=NODES_BAR,
            direction="<=",
        )
    )
    return bars + golden_network.bars()


def corpus(directory: Path) -> Path:
    """Write sequences that a model can learn something of.

    So the check of equal loss means something.
    """
    write_learnable_corpus(
        directory,
        real_lengths(SAMPLES, seed=0),
        real_lengths(100, seed=1),
        vocab_size=VOCAB_SIZE,
    )
    return directory


def _tuning(
    machine: MultirankMachine,
    place: Path,
    data: Path,
    *,
    count: int,
    rows: int,
    seq_length_tokens: int,
) -> NetworkTuning:
    """Return the figures at this global batch per rank, in sequences."""
    config = TrainConfig(
        model=ModelSettings(name="bert-4x256", config=MODEL),
        seq_length_tokens=seq_length_tokens,
        micro_batch_size=rows,
        global_batch_size=rows * count,
        layout="packed",
    )
    request = NetworkRequest(
        config=config,
        data_dir=str(data),
        nodes=count,
        ranks_per_node=1,
        max_micro_batch_size=rows,
        tokens_per_sequence=float(config.seq_length_tokens),
        budget_s=600.0,
        trial_timeout_s=300.0,
    )
    trial_log = TrialLog(Path(tempfile.mkdtemp(dir=place)), "network")
    return NetworkTuning(
        request=request,
        runner=TrialRunner(
            machine=machine, trial_log=trial_log, site="lab", clock=SystemClock()
        ),
    )


def _predictions(
    count: int, rate: int, data: Path, place: Path, rounds: int
) -> list[dict[str, Any]]:
    with (
        hosts(count, rate) as lab,
        together(lab, Path(tempfile.mkdtemp(dir=place)) / "ranks") as machine,
    ):
        tuning = _tuning(
            machine,
            place,
            data,
            count=count,
            rows=ROWS,
            seq_length_tokens=SEQ_LENGTH_TOKENS,
        )
        tuning.measure_links()
        measured: list[list[_Turn]] = [[] for _ in PREDICTED]
        for number in range(rounds):
            before = tuning.steps(ROWS, steps=STEPS, number=2 * len(PREDICTED) * number)
            for position, (kept, (micro_batches, sync)) in enumerate(
                zip(measured, PREDICTED, strict=True)
            ):
                turn_number = 2 * (len(PREDICTED) * number + position) + 1
                travelled = tuning.steps(
                    ROWS, micro_batches, sync, steps=STEPS, number=turn_number
                )
                after = tuning.steps(ROWS, steps=STEPS, number=turn_number + 1)
                kept.append(_Turn(before=before, travelled=travelled, after=after))
                before = after
            sys.stderr.write(
                f"{count} hosts, {rate / 1e6:g} Mbit/s: round {number + 1} of"
                f" {rounds}\n"
            )
        assert tuning.links is not None
        fit = tuning.links.fits["between nodes"]
        rows = []
        for kept, (micro_batches, sync) in zip(measured, PREDICTED, strict=True):
            ratios, steps, withouts = [], [], []
            for turn in kept:
                compute = replace(
                    compute_of(turn.around, 0.0).of_rank,
                    slowdown_share=tuning.slowdown_share,
                )
                time = step_time(compute, ROWS, micro_batches, sync, tuning.network())
                steps.append(statistics.median(turn.travelled.step_s))
                withouts.append(statistics.median(turn.around.step_s))
                ratios.append(time.step_s / steps[-1])
            middle = statistics.median(steps)
            rows.append(
                {
                    "hosts": count,
                    "bits_per_s": rate,
                    "micro_batches": micro_batches,
                    "gradient_sync": sync.name,
                    "latency_s": fit.latency_s,
                    "bytes_per_s": fit.bytes_per_s,
                    "without_s": statistics.median(withouts),
                    "slowdown_share": tuning.slowdown_share,
                    "measured_s": middle,
                    "predicted_s": statistics.median(ratios) * middle,
                }
            )
            sys.stderr.write(f"  {json.dumps(rows[-1])}\n")
        return rows


def _choice(
    count: int, tokens: int, rate: int, data: Path, place: Path
) -> dict[str, Any]:
    """Return the choice of the tuning against the default.

    The network is the limit, and rounds are compared one by one.
    """
    with (
        hosts(count, rate) as lab,
        together(lab, Path(tempfile.mkdtemp(dir=place)) / "ranks") as machine,
    ):
        tuning = _tuning(
            machine, place, data, count=count, rows=1, seq_length_tokens=tokens
        )
        tuning.run()
        chosen, gain = tuning.fastest()
        default = tuning.tried[0]
        row = {
            "hosts": count,
            "bits_per_s": rate,
            "tokens_per_rank_and_step": tokens,
            "chosen": chosen.candidate.sync.name,
            "default_s": default.step_s,
            "chosen_s": chosen.step_s,
            "gain": None if gain is None else gain.value,
            "gain_low": None if gain is None else gain.low,
            "equal_loss": tuning.equal_loss,
        }
        sys.stderr.write(f"  {json.dumps(row)}\n")
        return row


if __name__ == "__main__":
    run(main)
