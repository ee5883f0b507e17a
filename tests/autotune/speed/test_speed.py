import math
from collections import Counter

import numpy as np
import pytest
import torch
from torch.nn import functional

from autotune.errors import MachineLacks, Undecided
from autotune.speed import decide, measure
from autotune.speed.decide import (
    data_sheet_rates,
    fit_matmul_rates,
    kernel_s,
    predict_speed,
)
from autotune.speed.jobs import count_kernels
from autotune.speed.jobs import measure_rates as measuring
from autotune.speed.measure import known_rates, measure_rates, rates_path, write_rates
from autotune.speed.values import Kernel, MachineRates, StepWork
from autotune.subjects.mlm.jobs import measure_rates as job
from autotune.subjects.mlm.jobs.trace import trace_steps
from autotune.trials.outcomes import Crashed, Measured
from benchmarks.speed import rank_order_share
from testbed.fakes import FakeMachine
from trainer.formats.errors import BadConfig
from trainer.formats.manifest import SpecialIds
from trainer.formats.presets import model_settings
from trainer.formats.train_config import TrainConfig

IDS = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
H100 = "NVIDIA H100 80GB HBM3"
LAYERS = 4
HIDDEN = 256
ROWS = 8
WIDTH = 128


def config(**changes):
    return TrainConfig.model_validate(
        {
            "model": model_settings("bert-mini"),
            "device": "cuda",
            "precision": "bf16",
            "layout": "packed",
            "attention_dropout": 0.0,
            "micro_batch_size": ROWS,
            "global_batch_size": ROWS,
            "seq_length_tokens": WIDTH,
        }
        | changes
    )


def work_of(**changes):
    steps = trace_steps(config(**changes), 1000, IDS, documents_per_sequence=2.0)
    return steps.trace.work


def counted(work):
    counts = Counter()
    for kernel, count in work.kernels:
        counts[kernel.kind] += count
    return counts


def _launches(work):
    return sum(count for kernel, count in work.kernels if kernel.kind != "graph call")


def test_traced_step_counts_matmuls():
    work = work_of(last_layer="dense", mlm_head="dense", compile=False)
    tokens = ROWS * WIDTH
    layer_elements = 4 * HIDDEN**2 + 2 * HIDDEN * 4 * HIDDEN
    head = HIDDEN**2 + HIDDEN * 1024  # the table has whole tiles
    matmuls = [
        (kernel, count) for kernel, count in work.kernels if kernel.kind == "matmul"
    ]
    # One for queries, keys and values.
    assert sum(count for _, count in matmuls) == 3 * (4 * LAYERS + 2)
    assert sum(kernel.flops * count for kernel, count in matmuls) == 6 * tokens * (
        LAYERS * layer_elements + head
    )
    attention = {
        kernel.name: (kernel.flops, count)
        for kernel, count in work.kernels
        if kernel.kind == "attention"
    }
    forward = 4 * tokens * (WIDTH / 2) * HIDDEN  # documents are half a sequence
    assert attention["varlen forward"] == (pytest.approx(forward, rel=0.01), LAYERS)
    assert attention["varlen backward"] == (
        pytest.approx(2.5 * forward, rel=0.01),
        LAYERS,
    )
    assert StepWork.of(work.to_json()) == work


def test_compiled_layers_launch_fewer_kernels():
    eager = work_of(compile=False)
    compiled = work_of()
    assert counted(eager)["matmul"] == counted(compiled)["matmul"]
    assert _launches(compiled) < _launches(eager)
    moving = ("copy", "math", "norm", "softmax", "random")
    assert compiled.bytes_of(*moving) < 0.9 * eager.bytes_of(*moving)
    assert (
        counted(compiled)["graph call"] > 2 * LAYERS > counted(eager)["graph call"] == 0
    )


def test_bias_gradients_cost_the_same_cast(monkeypatch):
    monkeypatch.setattr("trainer.model.working_copies._SIBLINGS", ())
    plain = work_of()
    monkeypatch.setattr(
        "trainer.model.masked_lm.verify_working_copies", lambda _: "gradients are cast"
    )
    assert work_of().bytes_of("norm") == pytest.approx(plain.bytes_of("norm"), rel=0.02)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_float8_matmuls_are_faster(torchao, recipe):
    plain = work_of(compile=True)
    float8 = work_of(compile=True, float8=recipe)
    bf16, fp8 = (
        {kernel: count for kernel, count in work.kernels if kernel.kind == "matmul"}
        for work in (plain, float8)
    )
    layers = sum(count for kernel, count in fp8.items() if kernel.dtype == "fp8")
    # The last layer's queries; the head has two.
    assert layers == sum(bf16.values()) - 6 == 3 * (4 * LAYERS + 1)
    assert sum(kernel.flops * count for kernel, count in fp8.items()) == pytest.approx(
        sum(kernel.flops * count for kernel, count in bf16.items())
    )
    assert float8.bytes_of("copy") > plain.bytes_of("copy")
    rates = data_sheet_rates(H100)
    assert rates.matmul["fp8"].flops_per_s == 2 * rates.matmul["bf16"].flops_per_s
    assert "fp8" not in data_sheet_rates("NVIDIA A100-SXM4-80GB").matmul
    times = [predict_speed(work, rates, config()).parts_s for work in (plain, float8)]
    assert times[1]["matmuls"] < times[0]["matmuls"]


def test_parts_add_up_to_the_step():
    work = work_of()
    speed = predict_speed(work, data_sheet_rates(H100), config(), 64.0)
    assert sum(speed.parts_s.values()) == pytest.approx(speed.step_s.value)
    assert speed.padded_tokens_per_s.value == pytest.approx(
        ROWS * WIDTH / speed.step_s.value
    )
    assert speed.non_padding_tokens_per_s.value == pytest.approx(
        speed.padded_tokens_per_s.value / 2
    )
    assert speed.mfu.value == pytest.approx(
        work.model_flops / speed.step_s.value / 989e12
    )
    assert speed.step_s.low < speed.step_s.value < speed.step_s.high
    # So few tokens that the host is slower than the GPU.
    assert max(speed.parts_s, key=speed.parts_s.get) == "host"


def test_kernels_around_float8_take_longer():
    work = work_of()
    rates = data_sheet_rates(H100)
    plain, narrow = (
        predict_speed(work, rates, config(compile=True, float8=recipe)).parts_s
        for recipe in ("none", "tensorwise")
    )
    assert narrow["memory-bound kernels"] == pytest.approx(
        decide.FLOAT8_SLOWER * plain["memory-bound kernels"]
    )
    assert (narrow["matmuls"], narrow["optimizer"]) == (
        plain["matmuls"],
        plain["optimizer"],
    )


@pytest.mark.parametrize(
    ("tokens", "window", "keys"),
    [(1024, 64, 384.0), (1024, 200, 640.0), (256, 64, 256.0)],
)
def test_windowed_attention_computes_whole_tiles(tokens, window, keys):
    parts = [
        torch.empty(tokens, 2, 64, dtype=torch.bfloat16, device="meta") for _ in "qkv"
    ]
    kernel = count_kernels._attention(
        "varlen", False, (*parts, (window, window)), parts[0], float(tokens)
    )
    assert (kernel.document_tokens, kernel.flops) == (
        keys,
        4.0 * tokens * 2 * keys * 64,
    )


def test_step_time_is_interpolated_between_sizes():
    # Of two micro-batches.
    moved = {size: (Kernel("copy", moved_bytes=size * 10**9), 2) for size in (8, 24)}
    update = Kernel("optimizer", moved_bytes=10**10)
    works = [
        StepWork(
            micro_batch_size=size,
            padded_tokens=2 * size * WIDTH,
            model_flops=1.0,
            kernels=(kernel, (update, 1)),
        )
        for size, kernel in moved.items()
    ]
    rates = data_sheet_rates(H100).model_copy(
        update={"kernel_s": 0.0, "host_runs_ahead": False, "launch_s": 0.0}
    )
    of_sequence, of_update = (
        bytes_ / rates.passes["copy"][0].bytes_per_s for bytes_ in (10**9, 10**10)
    )
    seconds = decide.predict_steps_s(works, rates, config(), [2, 16, 24], [1, 3, 0.5])
    assert seconds == pytest.approx(
        [of_update + of_sequence * sequences for sequences in (2, 48, 12)]
    )


@pytest.mark.parametrize(
    ("kernel", "seconds"),
    [
        (Kernel("copy", moved_bytes=10**9), 1e9 / (0.87 * 3.35e12) + 3e-6),
        (
            Kernel("matmul", dtype="bf16", flops=1e12, moved_bytes=10**9),
            1e12 / (0.87 * 989e12) + 1e9 / 6.7e12 + 4e-6,
        ),
        (
            Kernel("attention", "varlen forward", "bf16", 1e12, 10**6, 200.0),
            2e12 / (0.35 * 989e12) + 3e-6,
        ),
        (Kernel("graph call"), 0.0),
    ],
    ids=["copy", "matmul", "attention", "graph call"],
)
def test_kernel_time_follows_bytes_with_flops(kernel, seconds):
    assert kernel_s(kernel, data_sheet_rates(H100)) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("gpu", "is_faster"), [(H100, True), ("NVIDIA A100-SXM4-80GB", False)]
)
def test_fa4_is_faster_where_it_was_measured(gpu, is_faster):
    rates = data_sheet_rates(gpu)
    slow, fast = (
        kernel_s(
            Kernel("attention", f"{name} backward", "bf16", 1e12, 10**6, 200.0), rates
        )
        for name in ("varlen", "FA4")
    )
    assert (fast < slow) == is_faster
    assert fast <= slow


def test_recovers_matmul_rates():
    rng = np.random.default_rng(0)
    flops = rng.uniform(1e9, 1e12, 40)
    moved = rng.uniform(1e6, 1e9, 40)
    rates = fit_matmul_rates(flops, moved, flops / 5e14 + moved / 4e12 + 7e-6)
    assert (rates.flops_per_s, rates.bytes_per_s, rates.fixed_s) == pytest.approx(
        (5e14, 4e12, 7e-6)
    )


def test_noise_gives_no_negative_rates():
    rng = np.random.default_rng(0)
    flops = rng.uniform(1e9, 1e12, 40)
    moved = rng.uniform(1e6, 1e9, 40)
    # Noise that asks for a negative term gets none.
    assert fit_matmul_rates(flops, moved, flops / 5e14 - 1e-7).fixed_s == 0.0


def test_attention_rates_fit_both_lengths():
    rates = decide.attention_rates((128, 512), (1e14, 2e14))
    for length, rate in ((128, 1e14), (512, 2e14)):
        assert rates.flops_per_s / (1 + rates.half_tokens / length) == pytest.approx(
            rate
        )
    assert decide.attention_rates((128, 512), (3e14, 2e14)).half_tokens == 0.0


def test_rank_order_counts_only_differing_pairs():
    assert rank_order_share([3, 2, 1], [3.0, 2.0, 1.0], differ_share=0.1) == 1.0
    assert rank_order_share([1, 2, 3], [3.0, 2.0, 1.0], differ_share=0.1) == 0.0
    assert rank_order_share([2, 1], [1.0, 1.05], differ_share=0.1) == 1.0


def quick(monkeypatch):
    """Measure with tiny operators and without a compiler."""
    for name, value in {
        "_CPU_PASSES_MIB": (1, 2),
        "_CPU_TOKENS": (64,),
        "_CPU_LAYERS": ((32, 64),),
        "REPEATS": 1,
    }.items():
        monkeypatch.setattr(measuring, name, value)
    monkeypatch.setattr(torch, "compile", lambda function: function)


def test_measured_rates_are_read_again(tmp_path, monkeypatch):
    quick(monkeypatch)
    # The times of a busy machine spread, which is not tested here.
    monkeypatch.setattr(measure, "MOST_SPREAD", math.inf)
    machine = FakeMachine(lambda trial: Measured(figures=job.run(trial.measured, {})))
    rates = measure_rates(machine, "cpu", "AMD EPYC", when_utc="2026-11-26T00:00:00Z")
    path = write_rates(rates, tmp_path)
    assert path == rates_path("AMD EPYC", tmp_path)
    assert known_rates("AMD EPYC", tmp_path) == rates
    assert {"cpu forward fp32", "cpu backward fp32"} <= set(rates.attention)
    assert rates.source == "measured on this machine, 2026-11-26"
    assert math.isfinite(
        predict_speed(
            work_of(device="cpu", precision="fp32"), rates, config()
        ).step_s.value
    )


def test_damaged_rates_file_is_named(tmp_path):
    rates = data_sheet_rates(H100)
    path = write_rates(rates.model_copy(update={"device": "AMD EPYC"}), tmp_path)
    path.write_text(path.read_text().replace('"launch_s"', '"lunch_s"', 1))
    with pytest.raises(BadConfig, match="lunch_s"):
        known_rates("AMD EPYC", tmp_path)


def test_unknown_machine_has_no_rates(tmp_path):
    assert known_rates("AMD EPYC", tmp_path) is None
    assert isinstance(known_rates(H100, tmp_path), MachineRates)


def test_failed_measurement_is_an_error():
    busy = FakeMachine(lambda _: Measured(figures={"spread": 1.9}))
    with pytest.raises(Undecided, match=r"1\.9 times"):
        measure_rates(busy, "cpu", "AMD EPYC", when_utc="2026")
    with pytest.raises(MachineLacks, match="could not be measured"):
        measure_rates(
            FakeMachine(lambda _: Crashed(detail="x")),
            "cpu",
            "AMD EPYC",
            when_utc="2026",
        )


def test_counts_bytes_once_for_each_tensor():
    from autotune.speed.jobs.measure_rates import _Counting

    value = torch.zeros(64, 32)
    with _Counting() as counting:
        functional.gelu(value.t().view(32, 64) if value.t().is_contiguous() else value)
        value.expand(4, 64, 32) + 1.0
    assert {kernel.kind: kernel.moved_bytes for kernel in counting.counter.counts} == {
        "math": 2 * 64 * 32 * 4,
        "copy": (1 + 4) * 64 * 32 * 4,
    }
