"""``python -m benchmarks.gpu.arithmetic``: prove that the GPU computes.

A pretended GPU computes nothing.
"""

import json
import statistics

import torch

SIZE, DEPTH, REPEATS = 8192, 128, 20


def main() -> None:
    """Print whether matmuls on the GPU are right, and how fast they are."""
    left, right = (
        torch.randint(
            -1, 2, shape, generator=torch.Generator().manual_seed(seed)
        ).float()
        for seed, shape in enumerate([(SIZE, DEPTH), (DEPTH, SIZE)])
    )
    # Whole numbers up to 128 are exact in bf16, in whichever order they are summed.
    product = left.to("cuda", torch.bfloat16) @ right.to("cuda", torch.bfloat16)
    square = torch.ones(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
    starts, ends = (
        [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS)] for _ in range(2)
    )
    for start, end in zip(starts, ends, strict=True):
        start.record()
        torch.mm(square, square)
        end.record()
    torch.cuda.synchronize()
    times_ms = [a.elapsed_time(b) for a, b in zip(starts, ends, strict=True)]
    seconds = statistics.median(times_ms) / 1e3
    answer = {
        "right": torch.equal(product.float().cpu(), left @ right),
        "flops_per_s": 2 * SIZE**3 / max(seconds, 1e-9),
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
