"""ZeRO-1 on one rank, for a trace: the optimizer has a part of the parameters."""

import torch


def keep_largest_part(
    optimizer: torch.optim.Optimizer, ranks: int, *, keeps_gradients: bool
) -> None:
    """Leave an optimizer the parameters of the fullest rank under ZeRO-1.

    Args:
        optimizer: Optimizer of all parameters.
        ranks: Ranks that share them.
        keeps_gradients: True if gradients outlive the step.
    """
    parameters = [
        parameter for group in optimizer.param_groups for parameter in group["params"]
    ]

    def drop_gradients(*_: object) -> None:
        for parameter in parameters:
            parameter.grad = None

    if not keeps_gradients:
        # The optimizer's own ``zero_grad`` clears the gradients of its part only.
        optimizer.register_step_post_hook(drop_gradients)
    kept = _parameters_of_fullest_rank(optimizer, ranks)
    for group in optimizer.param_groups:
        group["params"] = [
            parameter for parameter in group["params"] if id(parameter) in kept
        ]


def _parameters_of_fullest_rank(
    optimizer: torch.optim.Optimizer, ranks: int
) -> set[int]:
    """Return the identities of the parameters of the rank that has most elements.

    As in ``ZeroRedundancyOptimizer``, each parameter, the largest first, goes to the
    rank that has the fewest elements so far.
    """
    elements_by_rank = [0] * ranks
    parameters_by_rank: list[set[int]] = [set() for _ in range(ranks)]
    for group in optimizer.param_groups:
        for parameter in sorted(group["params"], key=torch.Tensor.numel, reverse=True):
            rank = elements_by_rank.index(min(elements_by_rank))
            parameters_by_rank[rank].add(id(parameter))
            elements_by_rank[rank] += parameter.numel()
    fullest_rank = elements_by_rank.index(max(elements_by_rank))
    return parameters_by_rank[fullest_rank]
