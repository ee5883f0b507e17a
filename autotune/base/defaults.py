"""Default values of options, declared once.

Commands, requests and suggested next commands use them.
"""

SEQ_LENGTH_TOKENS = 512
"""Positions in a sequence."""
MAX_MICRO_BATCH_SIZE = 16_384
"""Largest micro-batch size to try."""
HEADROOM_SHARE = 0.03
"""Share of the largest micro-batch size to leave unused."""
TRIAL_TIMEOUT_S = 600.0
"""Timeout of one trial, in seconds."""
WINDOW_S = 2.0
"""Duration of one timed window, in seconds."""
CONFIRM_WINDOW_S = 10.0
"""Duration of a window that promises the throughput of training, in seconds."""
CONFIRM_ROUNDS = 8
"""Maximum number of such windows per split of the global batch."""
BASELINE_ROUNDS = 10
"""Maximum number of timed windows per recipe."""
VOCAB_SIZE = 30_522
"""Vocabulary size of BERT, used if neither a dataset nor a profile gives another."""
