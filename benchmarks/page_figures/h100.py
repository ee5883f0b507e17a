"""Figures of one H100: our runs, other trainers on it, and your own code."""

from autotune.base.units import format_count, format_percent, format_share
from benchmarks.page_figures.formats import (
    Figures,
    Rows,
    difference,
    percent,
    row,
    seconds,
    speedup,
    times,
    worst_error,
)
from benchmarks.page_figures.recorded import Json, RecordedFigures


def figures(recorded: RecordedFigures) -> Figures:
    """Return all figures that were measured on an H100."""
    return {
        **_first_runs(recorded),
        **_current_runs(recorded),
        **_advice(recorded),
        **_single_steps(recorded),
        **_other_trainers(recorded),
    }


def _first_runs(recorded: RecordedFigures) -> Figures:
    check, profile = recorded.first_h100_check["figures"], recorded.first_h100_profile
    eager, compiled = check["training"]
    memory, workers = check["memory"][0], check["workers"][0]
    return {
        "h100.first.predicted_size": str(memory["traced"]),
        "h100.first.largest_size": str(memory["largest"]),
        "h100.first.too_large_size": str(
            profile["evidence"]["probe"]["infeasible_min"]
        ),
        "h100.first.peak_error": format_share(_peak_error(check)),
        "h100.first.eager.tokens_per_s": format_count(eager["tokens_per_s_per_gpu"]),
        "h100.first.eager.mfu": format_share(eager["mfu_share"]),
        "h100.first.compiled.tokens_per_s": format_count(
            compiled["tokens_per_s_per_gpu"]
        ),
        "h100.first.compiled.mfu": format_share(compiled["mfu_share"]),
        "h100.first.over_hf_trainer": speedup(profile, "hf-trainer"),
        "h100.first.over_paper": speedup(profile, "paper"),
        "h100.first.num_workers": str(workers["num_workers"]),
        "h100.first.data_wait": format_share(workers["data_wait_share"]),
    }


def _current_runs(recorded: RecordedFigures) -> Figures:
    first = recorded.first_h100_check["figures"]
    check = recorded.current_h100_check["figures"]
    memory, training = check["memory"][0], check["training"][0]
    return {
        "h100.now.predicted_size": str(memory["traced"]),
        "h100.now.largest_size": str(memory["largest"]),
        "h100.now.peak_error": format_share(_peak_error(check)),
        "h100.now.tokens_per_s": format_count(training["tokens_per_s_per_gpu"]),
        "h100.now.mfu": format_share(training["mfu_share"]),
        "h100.worst_peak_error": format_share(
            max(_peak_error(first), _peak_error(check))
        ),
        "h100.own_code": _own_code_rows(recorded.current_h100_trials),
        "h100.examples_in_2_gb": _example_sizes(recorded.current_h100_trials),
    }


def _peak_error(check: Json) -> float:
    return worst_error(check["memory"], "traced_peak_bytes", "peak_bytes")


def _own_code_rows(trials: Json) -> Rows:
    rows = []
    for name, search in trials["your own code"].items():
        outcomes = ", ".join(
            f"{size}: {outcome}" for size, outcome in search["without_autotune"].items()
        )
        largest = format_count(search["max_micro_batch_size"])
        duration = seconds(search["seconds"], 0)
        rows.append(row(name, largest, outcomes, search["trials"], duration))
    return rows


def _example_sizes(trials: Json) -> str:
    sizes = []
    for name, search in trials["examples, 2 GB"].items():
        effort = f"{search['trials']} trials, {seconds(search['seconds'], 0)}"
        sizes.append(f"{search['max_micro_batch_size']} ({name}; {effort})")
    return ", ".join(sizes)


def _advice(recorded: RecordedFigures) -> Figures:
    check = recorded.first_h100_check
    answer = check["stages"]["advise-bert-120m"]["answer"]
    eager, compiled = check["figures"]["training"]
    gain = answer["advice"][0]["gain"]
    delivered = compiled["tokens_per_s_per_gpu"] / eager["tokens_per_s_per_gpu"]
    interval = f"{gain['low']:.1f} to {gain['high']:.1f}"
    return {
        "h100.advice.memory_bound": format_percent(
            answer["bottleneck"]["parts"][0]["share"]
        ),
        "h100.advice.compile_promised": f"{times(gain['ratio'], 2)} ({interval})",
        "h100.advice.compile_delivered": times(delivered, 2),
    }


def _single_steps(recorded: RecordedFigures) -> Figures:
    steps = recorded.first_h100_steps["steps"]
    alternatives = recorded.first_h100_steps["alternatives of bert-120m"]
    few_sequences = alternatives["8 sequences, kernels combined with one block size"]
    error = worst_error(steps.values(), "pretended_peak_bytes", "peak_bytes")

    def gain(step: str, variant: str) -> str:
        return difference(steps[step]["kernels_s"] / steps[variant]["kernels_s"])

    return {
        "h100.steps.count": str(len(steps)),
        "h100.steps.pretended_peak_error": percent(error, 2),
        "h100.steps.other_host": f"{few_sequences['step_s'] * 1e3:.0f} ms",
        "h100.steps.bf16_residual_gain": gain("bert-120m", "bert-120m, bf16 residual"),
        "h100.steps.float8_gain": gain("bert-120m", "bert-120m, float8"),
        "h100.steps.float8_gain_350m": gain("bert-350m", "bert-350m, float8"),
    }


def _other_trainers(recorded: RecordedFigures) -> Figures:
    gpu, by_hand, targets = recorded.gpu, recorded.gpu.by_hand, recorded.gpu.targets
    ours, promised = by_hand["trainers"][0], by_hand["promised"]
    return {
        "gpu.against_fastest": times(gpu.against("fastest")),
        "gpu.against_defaults": times(gpu.against("defaults"), 0),
        "gpu.against_paper": times(gpu.against("paper")),
        "gpu.against_fastest.target": times(targets["against_fastest_trainer_ratio"]),
        "gpu.conditions": gpu.conditions(),
        "gpu.bert_120m_mfu.target": format_percent(targets["bert_120m_mfu_share"]),
        "gpu.bert_350m_mfu.target": format_percent(targets["bert_350m_mfu_share"]),
        "gpu.modernbert_base_mfu.target": format_percent(
            targets["modernbert_base_mfu_share"]
        ),
        "gpu.trainers": [
            row(trainer["name"], trainer["rate"], trainer["ours"], trainer["measured"])
            for trainer in gpu.trainer_rows()
        ],
        "gpu.promised": [
            row(
                promise["name"],
                promise["promised_tokens_per_s"],
                promise["delivered_by_tune_per_s"],
                promise["delivered_by_train_per_s"],
                promise["where"],
            )
            for promise in gpu.rows("promised")
        ],
        "gpu.step_settings": [
            row(
                step["name"],
                step["step_ms"],
                step["tokens_per_s"],
                step["mfu_share"],
                step["matmul_ms"],
                step["attention_ms"],
                step["layer_norm_ms"],
                step["gelu_ms"],
                step["copies_and_casts_ms"],
                step["rest_ms"],
                step["where"],
            )
            for step in gpu.rows("step")
        ],
        "by_hand.date": by_hand["measured"],
        "by_hand.conditions": by_hand["conditions"],
        "by_hand.source": by_hand["source"],
        "by_hand.tokens_per_s": format_count(ours["tokens_per_s"]),
        "by_hand.promised": format_count(promised["promised_tokens_per_s"]),
        "by_hand.delivered": ", ".join(
            map(format_count, promised["delivered_tokens_per_s"])
        ),
        "by_hand.steps": [
            row(
                step["step"],
                f"{step['step_ms']:.1f}",
                format_count(step["tokens_per_s"]),
                format_share(step["mfu_share"]),
            )
            for step in by_hand["steps"]
        ],
    }
