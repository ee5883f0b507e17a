"""Which unit a name carries: every quantity of this project says it, as the last words of its name."""

_OF_LAST_WORDS = (
    ("tokens_per_s_per_rank", "tokens/s per rank"),
    ("flops_per_s_per_rank", "FLOP/s per rank"),
    ("tokens_per_s", "tokens/s"),
    ("flops_per_s", "FLOP/s"),
    ("bytes_per_s", "bytes/s"),
    ("bits_per_s", "bits/s"),
    ("tokens_per_row", "tokens per row"),
    ("micro_batches_per_step", "micro-batches per step"),
    ("micro_batches", "micro-batches"),
    ("bytes", "bytes"),
    ("mib", "MiB"),
    ("per_cpu", "MiB per processor"),
    ("minutes", "minutes"),
    ("ms", "ms"),
    ("s", "s"),
    ("seconds", "s"),
    ("utc", "UTC"),
    ("w", "W"),
    ("mhz", "MHz"),
    ("share", "share of 1"),
    ("shares", "shares of 1"),
    ("ratio", "ratio"),
    ("efficiency", "ratio"),
    ("sigmas", "standard deviations"),
    *((noun, noun) for noun in ("tokens", "rows", "steps", "samples", "nodes", "ranks", "windows", "trials", "epochs")),
    *((noun, noun) for noun in ("batches", "workers", "parameters", "flops", "rollbacks", "rounds", "hours")),
)


def unit_of(name: str) -> str | None:
    """The unit that a name of a field or an option ends with; of a bound (``…_low``) that of what it bounds.

    Args:
        name: Of a field, or of an option without its dashes.
    """
    words = name.replace("-", "_").removesuffix("_low").removesuffix("_high")
    if words.startswith("ratio_to_"):
        return "ratio"
    for last, unit in _OF_LAST_WORDS:
        if words == last or words.endswith(f"_{last}"):
            return unit
    return None
