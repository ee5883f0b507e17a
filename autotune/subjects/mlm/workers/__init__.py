"""Windows of the bundled trainer, and the sweep of its DataLoader workers.

``windows`` makes windows of it for ``autotune.workers``, and ``stage`` is the whole
phase for a probed profile.
"""
