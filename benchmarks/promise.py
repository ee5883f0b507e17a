"""``python -m benchmarks.promise``: rates that tunings promise, and training delivers.

``autotune tune`` runs for ten configurations of small models on this machine's CPU,
each in its own process: models, precisions, sequence lengths, global batches and
numbers of ranks differ. Each tuning measures its result in windows of training,
promises an interval for one further process, and then trains by ``python -m trainer``.
Counted is how often that training's rate lies in the interval. An interval of 95 %
holds 9.5 of 10 on average, if it covers what differs between processes; a wide one
would hold them all, so its width has a bar too.

No promise can be narrower than the machine is steady. So a matmul is repeated in one
process first: the interval for its rate in the next ten seconds is that of the machine.
"""

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autotune.base.defaults import CONFIRM_WINDOW_S
from autotune.base.interval import Interval
from autotune.base.tables import text_table
from autotune.base.units import format_count, format_share
from autotune.base.window_statistics import predict_window
from autotune.evidence.confirm import ConfirmEvidence
from autotune.profiles.store import read_profile
from benchmarks.bars import Bar, Direction, bars_of, finish, measuring, parser, run
from testbed.corpora import real_lengths, write_corpus
from testbed.programs import run_program

BARS: dict[str, tuple[str, Direction, float]] = {
    "promise_kept_share": ("share", ">=", 0.9),
    "promise_half_width_median_share": ("share", "<=", 0.03),
}
MACHINE_WINDOWS = 8
"""Windows of the matmul, each as long as one of a tuning."""
MATMUL_SIZE = 512
"""Rows and columns of its matrices."""
MINUTES = 4.0
"""Time limit of each tuning, of which the training at its end takes a tenth."""
SAMPLES = 3000
TIMEOUT_FACTOR = 4.0
"""Longest duration of a tuning, as a multiple of its time limit."""
_BERT = {
    "model_type": "bert",
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "num_attention_heads": 2,
    "intermediate_size": 512,
    "max_position_embeddings": 512,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A configuration to tune."""

    name: str
    config: dict[str, object]
    """Values of the model's config that differ from those of the small BERT."""
    options: str
    """Options of ``autotune tune``."""
    global_batch_tokens: int = 8192
    """Global batch in non-padding tokens."""


CASES = (
    Case(name="BERT", config={}, options="--seq-length 128"),
    Case(
        name="RoBERTa",
        config={"model_type": "roberta", "max_position_embeddings": 514},
        options="--seq-length 128",
    ),
    Case(
        name="ModernBERT",
        config={"model_type": "modernbert", "num_hidden_layers": 3},
        options="--seq-length 128",
    ),
    Case(
        name="ELECTRA, which cannot be packed",
        config={"model_type": "electra", "embedding_size": 128},
        options="--seq-length 128",
    ),
    Case(name="longer sequences", config={}, options="--seq-length 512"),
    Case(name="bf16", config={}, options="--seq-length 128 --precision bf16"),
    Case(
        name="wider",
        config={"hidden_size": 256, "num_attention_heads": 4},
        options="--seq-length 256",
    ),
    Case(name="deeper", config={"num_hidden_layers": 6}, options="--seq-length 128"),
    Case(
        name="small global batch",
        config={},
        options="--seq-length 128",
        global_batch_tokens=2048,
    ),
    Case(name="two ranks", config={}, options="--seq-length 128 --ranks 2"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """Promised and delivered rates of a configuration."""

    name: str
    promised_tokens_per_s: float
    half_width_share: float | None
    """Half of the promised interval, relative to the rate; None without bounds."""
    delivered_tokens_per_s: float | None
    """Rate of the training; None if there was none."""
    not_delivered: str | None
    """Reason why there was no training."""
    kept: bool | None
    """True if the delivered rate lies in the interval; None if that is not known."""
    rounds: int
    """Windows of the chosen split."""
    seconds: float
    """Duration of the whole tuning."""

    @property
    def ratio(self) -> float | None:
        """Delivered rate, divided by the promised one."""
        if self.delivered_tokens_per_s is None:
            return None
        return self.delivered_tokens_per_s / self.promised_tokens_per_s


@measuring
def main(arguments: Sequence[str] | None) -> int:
    """Tune every configuration, print the promises and return the exit code."""
    options_of = parser("promise", "Compare promised with delivered rates.")
    options_of.add_argument(
        "--minutes", type=float, default=MINUTES, help="time limit of each tuning"
    )
    options_of.add_argument("--only", default="", help="configuration to tune")
    options = options_of.parse_args(arguments)
    cases = [case for case in CASES if options.only in case.name]
    if not cases:
        names = ", ".join(case.name for case in CASES)
        options_of.error(f"no configuration has {options.only!r} in its name: {names}")
    sys.stderr.write("the machine: repeating a matmul\n")
    machine_half_width_share = _machine_half_width_share()
    promises = []
    with tempfile.TemporaryDirectory(prefix="promise-") as directory:
        data = write_corpus(Path(directory) / "data", real_lengths(SAMPLES, seed=0))
        for number, case in enumerate(cases):
            place = Path(directory) / f"case-{number}"
            place.mkdir()
            promises.append(_tune(case, data, place, options.minutes))
            sys.stderr.write(f"{number + 1}/{len(cases)}: {_words(promises[-1])}\n")
    print(_table(promises))
    print(f"\n{_machine_words(machine_half_width_share)}")
    content: dict[str, Any] = {
        "minutes": options.minutes,
        "machine_half_width_share": machine_half_width_share,
        "promises": [asdict(promise) for promise in promises],
    }
    return finish(options.json, _bars(promises), content)


def _machine_half_width_share() -> float | None:
    """Return how much the machine's own speed varies between windows.

    It is half of the 95 % interval for one further window of a matmul in this process,
    relative to its rate; None if that is too wide to use.
    """
    import torch

    matrix = torch.randn(MATMUL_SIZE, MATMUL_SIZE)
    rates = []
    for _ in range(MACHINE_WINDOWS):
        began_s = time.monotonic()
        count = 0
        while (seconds := time.monotonic() - began_s) < CONFIRM_WINDOW_S:
            torch.mm(matrix, matrix)
            count += 1
        rates.append(count / seconds)
    interval = predict_window(rates).interval()
    return _half_width_share(interval)


def _half_width_share(interval: Interval) -> float | None:
    """Return half of an interval, relative to its figure; None without bounds."""
    if interval.low is None or interval.high is None:
        return None
    return (interval.high - interval.low) / 2 / interval.value


def _tune(case: Case, data: Path, place: Path, minutes: float) -> Promise:
    """Tune a configuration, and return what it promised and delivered."""
    (place / "model.json").write_text(json.dumps(_BERT | case.config))
    command = [
        *(sys.executable, "-m", "autotune", "tune", "--model", "model.json"),
        *("--data", str(data), "--device", "cpu", "--memory", "400MiB"),
        *("--max-micro-batch-size", "32"),
        *("--time-limit", f"{minutes:g}min"),
        *("--skip", "network", "--skip", "baseline", "--here", "--json"),
        *("--global-batch-tokens", str(case.global_batch_tokens)),
        *case.options.split(),
    ]
    began_s = time.monotonic()
    run_program(
        command, timeout_s=60 * minutes * TIMEOUT_FACTOR, cwd=place, stderr=None
    )
    seconds = time.monotonic() - began_s
    (path,) = (place / "profiles").glob("*.toml")
    confirm = read_profile(path).profile.evidence.confirm
    assert confirm is not None, "the tuning had no time to confirm its result"
    return _promise_of(case.name, confirm, seconds)


def _promise_of(name: str, confirm: ConfirmEvidence, seconds: float) -> Promise:
    """Return a promise from the evidence of a profile."""
    promised = confirm.promised
    delivered = confirm.delivered
    return Promise(
        name=name,
        promised_tokens_per_s=promised.value,
        half_width_share=_half_width_share(promised),
        delivered_tokens_per_s=None if delivered is None else delivered.tokens_per_s,
        not_delivered=confirm.not_delivered,
        kept=confirm.is_kept,
        rounds=len(confirm.rows[0].tokens_per_s),
        seconds=round(seconds, 1),
    )


def _bars(promises: Sequence[Promise]) -> list[Bar]:
    """Return the share of promises that were kept, and the width of the intervals."""
    widths = sorted(
        promise.half_width_share
        for promise in promises
        if promise.half_width_share is not None
    )
    # A promise without a training, or without bounds, is not kept.
    kept_share = sum(promise.kept is True for promise in promises) / len(promises)
    median = widths[len(widths) // 2] if len(widths) == len(promises) else None
    return bars_of(
        BARS,
        {"promise_kept_share": kept_share, "promise_half_width_median_share": median},
    )


def _words(promise: Promise) -> str:
    """Return a promise and what became of it, in a line."""
    kept = {True: "kept", False: "not kept", None: "not known"}[promise.kept]
    return f"{promise.name}: {kept}"


def _machine_words(half_width_share: float | None) -> str:
    """Return how steady the machine is, in words."""
    words = f"The machine's own speed in the next {CONFIRM_WINDOW_S:g} s is known"
    if half_width_share is None:
        return f"{words} too vaguely for an interval."
    return f"{words} to ±{format_share(half_width_share)} at 95 % confidence."


def _table(promises: Sequence[Promise]) -> str:
    """Return the table of all promises."""
    headers = (
        "configuration",
        "promised",
        "half-width",
        "delivered",
        "ratio",
        "kept",
        "rounds",
    )
    rows = [
        [
            promise.name,
            format_count(promise.promised_tokens_per_s),
            None
            if promise.half_width_share is None
            else format_share(promise.half_width_share),
            None
            if promise.delivered_tokens_per_s is None
            else format_count(promise.delivered_tokens_per_s),
            None if promise.ratio is None else f"{promise.ratio:.3f}",
            {True: "yes", False: "no", None: None}[promise.kept],
            str(promise.rounds),
        ]
        for promise in promises
    ]
    return text_table(headers, rows, "lrrrrlr")


if __name__ == "__main__":
    run(main)
