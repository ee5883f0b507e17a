"""Child processes: the only modules of this package that import torch.

The ``training`` job begins in ``training.run``: it lets one of the ``consumers`` take
``batches`` for a ``timed_window``. Jobs of other packages use the same parts.
"""
