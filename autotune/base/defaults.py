"""Defaults of options, each declared once, for commands, requests and the commands that are suggested next."""

SEQ_LENGTH_TOKENS = 512
"""Positions of a sequence."""
MAX_ROWS = 16_384
"""The largest micro-batch that is looked for."""
HEADROOM_SHARE = 0.03
"""Share of the largest micro-batch that is left free."""
TRIAL_TIMEOUT_S = 600.0
"""Time that one trial may take."""
WINDOW_S = 2.0
"""Time of one timed window."""
JOINT_TRIALS = 12
"""Of workers, prefetching and pinning together, if no number of workers is enough."""
BASELINE_ROUNDS = 10
"""Windows of each recipe at most."""
VOCAB_SIZE = 30_522
"""BERT's vocabulary, without a dataset or a profile that says better."""
