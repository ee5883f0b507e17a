"""Output on speed.

It shows the predicted time of a step by part, and the constants of a machine.
"""

from collections.abc import Callable
from pathlib import Path

from autotune.base.document import Table, facts_table
from autotune.base.interval import Interval
from autotune.base.render_console import console_text
from autotune.base.tables import Row
from autotune.base.units import format_count, format_seconds, format_share
from autotune.speed.values import MachineRates, SpeedPrediction


def speed_table(speed: SpeedPrediction, max_micro_batch_size: int) -> Table:
    """Return a table of a predicted step near the largest that fits.

    It shows tokens/s, MFU, and where the time goes.
    """
    whole_s, parts = (
        sum(speed.parts_s.values()),
        sorted(speed.parts_s.items(), key=lambda one: -one[1]),
    )
    rows: list[Row] = [
        [
            "tokens/s including padding, one rank",
            _ranged(speed.padded_tokens_per_s, format_count),
        ],
        ["non-padding tokens/s", _ranged(speed.non_padding_tokens_per_s, format_count)],
        ["MFU", _ranged(speed.mfu, format_share)],
        ["step time", _ranged(speed.step_s, format_seconds)],
        *(
            [f"share of {part}", format_share(part_s / whole_s)]
            for part, part_s in parts
        ),
        ["source", speed.source],
    ]
    near = (
        ""
        if speed.micro_batch_size == max_micro_batch_size
        else f"the traced one next to {max_micro_batch_size}, "
    )
    caption = (
        f"speed at micro-batch size {speed.micro_batch_size} ({near}the largest that"
        " fits), predicted"
    )
    return facts_table(caption, rows)


def rates_text(rates: MachineRates, path: Path) -> str:
    """Return the constants of a machine for people, with the file that holds them."""
    rows: list[tuple[str, str]] = [
        *(
            (f"matmuls in {dtype}", f"{one.flops_per_s / 1e12:.3g} TFLOP/s")
            for dtype, one in rates.matmul.items()
        ),
        *(
            (f"{name} attention", f"{one.flops_per_s / 1e12:.3g} TFLOP/s")
            for name, one in rates.attention.items()
        ),
        *(
            (f"{kind} kernels", f"{one[-1].bytes_per_s / 1e9:.3g} GB/s")
            for kind, one in rates.passes.items()
        ),
        ("host time per kernel", format_seconds(rates.launch_s)),
        ("host time per compiled graph", format_seconds(rates.graph_call_s)),
        ("written to", str(path)),
    ]
    caption = f"Speed of {rates.device}, measured"
    return console_text(
        [
            Table(
                caption=caption,
                headers=("constant", "value"),
                rows=tuple(rows),
                align="lr",
            )
        ]
    )


def _ranged(one: Interval | None, shown: Callable[[float], str]) -> str | None:
    if one is None or one.low is None or one.high is None:
        return None
    return f"{shown(one.value)} ({shown(one.low)} to {shown(one.high)})"
