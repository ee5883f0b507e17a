"""Run autotune's own commands on a GPU, as a queue of stages over several calls.

``python -m benchmarks.gpu --out DIR --next 9min`` runs the next stages of the queue
that fit into this time; ``--list`` shows the queue without a GPU.

stage          one command, its time, and what it needs
step_settings  settings of a training step that are compared
stages         the queue: all stages, the most valuable first
results        results that are known: of this directory, and kept ones
queue          what is next, what is left out, and why
running        run the stages of a queue, each within its time
dataset        the dataset that all stages read
arithmetic     proof that the GPU computes, and its matmul rate
plausibility   reasons not to keep a check
figures        measured values of a check, beside predicted ones
claims         figures compared with their targets
page           the page of results
keeping        copy a check to ``reports/gpu/GPU/DATE``
"""
