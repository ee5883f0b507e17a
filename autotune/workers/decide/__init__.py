"""Pure decisions of the sweep: no torch, files, clock or environment.

``worker_count`` chooses the number of workers and the rounds to measure next, by the
verdicts of ``count_verdicts``. ``loader_limits`` bounds it by CPUs and memory.
``gpu_utilisation`` finds where the GPU's utilisation contradicts the choice, and
``window_time`` tells the least time of a window.
"""
