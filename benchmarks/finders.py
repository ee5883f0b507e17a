"""The largest micro-batch as two common tools find it.

They get the same step and the same memory limit, in one process for each.

* Lightning's ``BatchSizeFinder`` (by way of its ``Tuner``): doubles from 2, then halves
  the gap, three steps each;
* accelerate's ``find_executable_batch_size``: from 1,024 down, a tenth less after each
  refusal.

Both try one size after the other in one process. The limit counts from the end of the
imports, and so do the seconds. A user would have to add some code to get a right
answer; each such addition has a comment.
"""

import contextlib
import gc
import importlib
import logging
import multiprocessing
import os
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from autotune.base.process import end_with_parent
from trainer.formats.presets import PRESETS

LIGHTNING_FIRST_ROWS = 2
"""Lightning's default."""
ACCELERATE_FIRST_ROWS = 1024
STEPS_PER_TRIAL = 3
"""Lightning's default; accelerate leaves it to its user."""

_TIMEOUT_S = 900.0
_MOST_ROWS = 8192
"""Lightning's own limit."""
# In the server that processes are forked from, so that each starts at once; as
# autotune's own server has them.
_PRELOADED = [
    "accelerate.utils",
    "lightning.pytorch.tuner.tuning",
    "trainer.loop",
    "torch._dynamo",
]
# To the favour of both: oneDNN keeps its last 1,024 compiled kernels, which is all of
# every size that was tried, up to 20 MiB for each. So many are enough for one size.
_ONEDNN_KERNELS = "32"
_KNOWN_REFUSAL = "DefaultCPUAllocator: can't allocate memory"
"""The one that both tools know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A step and a limit. Everything is JSON, as a trial takes it."""

    name: str
    config: Mapping[str, Any]
    """A trainer configuration; its number of rows is what is sought."""
    vocab_size: int
    special_ids: Mapping[str, int]
    memory_budget_bytes: int

    def config_of(self, rows: int) -> dict[str, Any]:
        """Return the configuration with a micro-batch of ``rows`` sequences a step."""
        return dict(self.config) | {"micro_batch_size": rows, "global_batch_size": rows}


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Answer of a tool."""

    rows: int | None
    """None where it ended without an answer."""
    trials: int
    """Sizes it tried, whatever became of them; the same size twice counts twice."""
    refused: int
    """Trials that the limit ended."""
    seconds: float
    """From the first model to the answer, imports left out."""
    note: str = ""
    """Why there is no answer, or what is wrong with it."""


def find_with_lightning(case: Case, margin: float) -> Found:
    """Search with Lightning.

    ``margin`` is the part that it takes off its answer (its default is 0.05).
    """
    return _in_child(partial(_lightning, margin=margin), case)


def find_with_accelerate(case: Case) -> Found:
    """Search with accelerate, downwards."""
    return _in_child(_accelerate, case)


class _Trials:
    """Counts in memory that the parent shares.

    They outlive a process that is aborted.
    """

    def __init__(self, counts: Any) -> None:
        self._counts = counts

    def begin(self) -> None:
        """Count a size that is about to be tried."""
        self._counts[0] += 1

    @contextlib.contextmanager
    def refusals(self) -> Iterator[None]:
        """Count an allocator's refusal, and raise it as an error that both tools know.

        This favours both: they know torch's own allocator only. A refusal of oneDNN's,
        of the C++ library's or of Python's would end their search.
        """
        from trainer.runtime.out_of_memory import out_of_memory

        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if out_of_memory(error) is None:
                raise
            self._counts[1] += 1
            if _KNOWN_REFUSAL in str(error):
                raise
            raise RuntimeError(
                f"{_KNOWN_REFUSAL} ({type(error).__name__}: {error})"
            ) from error


class _Bench:
    """Training steps that both tools try."""

    def __init__(self, case: Case) -> None:
        from autotune.trials.jobs.budget import enforce
        from autotune.trials.jobs.cpu_allocators import keep_one_arena
        from trainer.formats.manifest import SpecialIds
        from trainer.formats.tables import parse_table
        from trainer.formats.train_config import TrainConfig
        from trainer.runtime.ranks import join_ranks

        self._case = case
        self.config = parse_table(
            TrainConfig, case.config_of(LIGHTNING_FIRST_ROWS), where=case.name
        )
        self._special_ids = parse_table(
            SpecialIds, dict(case.special_ids), where=case.name
        )
        keep_one_arena()  # as autotune's trials do, before there is a second thread
        self.ranks = join_ranks(self.config, environment={})
        enforce(case.memory_budget_bytes, self.ranks.device, None)

    def build(self) -> Any:
        """Build the model, its optimizer and its step.

        On a CPU they are the same for every micro-batch size.
        """
        from trainer.build import build_training

        return build_training(
            self.config, self._case.vocab_size, self._special_ids, self.ranks
        )

    def batch(self, rows: int) -> Any:
        """Full random rows."""
        config = self.config.model_copy(
            update={"micro_batch_size": rows, "global_batch_size": rows}
        )
        return _fullest_batch(config, self._case.vocab_size, self._special_ids)

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, as in a training from scratch."""
        from trainer.distributed.optimizer import learning_rate

        return learning_rate(self.config, step)


def _fullest_batch(config: Any, vocab_size: int, special_ids: Any) -> Any:
    """Return the batch that autotune's own trials take."""
    from autotune.subjects.mlm.jobs.worst_case import fullest_batch

    return fullest_batch(config, vocab_size, special_ids)


def _lightning(bench: _Bench, trials: _Trials, margin: float) -> int | None:
    import lightning.pytorch as lightning
    import torch
    from lightning.pytorch.tuner.tuning import Tuner

    from trainer.distributed.step import TrainStep

    class Rows(torch.utils.data.Dataset[Any]):
        """As many rows as the longest trial takes; a batch of them is made at once."""

        def __len__(self) -> int:
            return STEPS_PER_TRIAL * _MOST_ROWS

        def __getitems__(self, places: Sequence[int]) -> Any:
            with trials.refusals():
                return bench.batch(len(places))

    class Module(lightning.LightningModule):
        """The step, which is the trainer's own and not Lightning's."""

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.batch_size = LIGHTNING_FIRST_ROWS
            self.training_parts = bench.build()
            self.module = self.training_parts.module

        def configure_optimizers(self) -> Any:
            return self.training_parts.optimizer

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(
                Rows(), batch_size=self.batch_size, collate_fn=_as_it_is
            )

        def on_train_start(self) -> None:
            trials.begin()

        def training_step(self, batch: Any, number: int) -> None:
            # Lightning counts the steps of its own optimizer, which wraps ours.
            optimizer: Any = self.optimizers()
            # To its favour, and as its automatic optimization does: a refused step
            # leaves gradients behind.
            optimizer.zero_grad()
            parts = self.training_parts
            changed = parts.module.weights_changed
            step = TrainStep(
                parts.parallel_module,
                optimizer,
                bench.config,
                bench.ranks,
                weights_changed=changed,
            )
            with trials.refusals():
                step.run([batch], bench.learning_rate(number))

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(Path.cwd()),
    )
    rows: int | None = Tuner(trainer).scale_batch_size(
        Module(),
        mode="binsearch",
        init_val=LIGHTNING_FIRST_ROWS,
        steps_per_trial=STEPS_PER_TRIAL,
        margin=margin,
        max_val=_MOST_ROWS,
    )
    return rows


def _as_it_is(batch: Any) -> Any:
    return batch


def _accelerate(bench: _Bench, trials: _Trials) -> int:
    from accelerate.utils import find_executable_batch_size

    def train(batch_size: int) -> int:
        # To its favour: it collects while the refusal still holds on to the refused
        # trial's memory.
        gc.collect()
        trials.begin()
        with trials.refusals():
            step = bench.build().step
            for number in range(STEPS_PER_TRIAL):
                step.run([bench.batch(batch_size)], bench.learning_rate(number))
        return batch_size

    rows: int = find_executable_batch_size(
        train, starting_batch_size=ACCELERATE_FIRST_ROWS
    )()
    return rows


Find = Callable[[_Bench, _Trials], int | None]


def _in_child(find: Find, case: Case) -> Found:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    counts = context.RawArray("q", 2)
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="finder-") as place:
        process = context.Process(
            target=_child, args=(find, case, counts, sender, place), daemon=True
        )
        started_s = time.perf_counter()
        process.start()
        sender.close()
        try:
            rows, seconds, note = (
                receiver.recv()
                if receiver.poll(_TIMEOUT_S)
                else (None, _TIMEOUT_S, "timed out")
            )
        except EOFError:
            process.join()
            rows, seconds, note = (
                None,
                time.perf_counter() - started_s,
                _death(process.exitcode, Path(place, "log")),
            )
        process.kill()
        process.join()
    trials, refused = counts
    if rows is not None and trials == refused:
        note = "nothing that it tried fitted"
    return Found(rows=rows, trials=trials, refused=refused, seconds=seconds, note=note)


def _child(
    find: Find,
    case: Case,
    counts: Any,
    sender: Connection,
    place: str,
) -> None:
    end_with_parent(os.getppid())
    os.chdir(place)
    log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    warnings.simplefilter("ignore")
    os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = _ONEDNN_KERNELS
    _import(case)
    bench = _Bench(case)
    started_s = time.perf_counter()
    rows, note = None, ""
    try:
        rows = find(bench, _Trials(counts))
    except Exception as error:  # noqa: BLE001 - the border of the process: an error is an answer, too
        note = f"{type(error).__name__}: {error}"[:500]
    sender.send((rows, time.perf_counter() - started_s, note))


def _import(case: Case) -> None:
    """Everything that a step or a tool imports, before memory and seconds count."""
    from autotune.trials.jobs.preload import preload_model, preload_trainer

    for module in _PRELOADED:  # it may be another's server that this process comes from
        importlib.import_module(module)
    preload_trainer()
    preload_model(case.config["model"]["config"]["model_type"])


def _death(exit_code: int | None, log: Path) -> str:
    cause = (
        f"exit code {exit_code}"
        if exit_code is None or exit_code >= 0
        else signal.Signals(-exit_code).name
    )
    last = (
        log.read_text(errors="replace").strip().splitlines()[-1:]
        if log.exists()
        else []
    )
    return ": ".join([f"the process died of {cause}", *last])[:500]


def cases() -> list[Case]:
    """Return six cases.

    Their answers are from a few sequences to some hundreds; they have four shapes and
    both precisions, with and without activation checkpointing.
    """
    modern = {"model_type": "modernbert", "max_position_embeddings": 8192}
    tiny_modern = modern | _shape(layers=4, hidden=128, heads=2, intermediate=192)
    tiny_roberta = {"model_type": "roberta"} | _shape(
        layers=3, hidden=128, heads=2, intermediate=512
    )
    return [
        _case("bert-small, 64", PRESETS["bert-small"], 64, 448),
        _case(
            "bert-mini, 512, recomputed",
            PRESETS["bert-mini"] | _NO_DROPOUT,
            512,
            320,
            activation_checkpointing="full",
        ),
        _case("bert-mini, 128", PRESETS["bert-mini"], 128, 480),
        _case("modernbert tiny, 256", tiny_modern, 256, 1024),
        _case("roberta tiny, 64, no dropout", tiny_roberta | _NO_DROPOUT, 64, 448),
        _case(
            "roberta tiny, 64, bf16",
            tiny_roberta,
            64,
            768,
            precision="bf16",
            activation_checkpointing="selective",
        ),
    ]


_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _shape(
    *, layers: int, hidden: int, heads: int, intermediate: int
) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": intermediate,
    }


def _case(
    name: str,
    shape: Mapping[str, Any],
    seq_length_tokens: int,
    budget_mib: int,
    **options: str,
) -> Case:
    model = {"name": "bench", "config": dict(shape)}
    return Case(
        name=name,
        config={"model": model, "seq_length_tokens": seq_length_tokens} | options,
        vocab_size=8192,
        special_ids={"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4},
        memory_budget_bytes=budget_mib * 2**20,
    )
