"""Export of a profile to other trainers (``profile export``). Pure.

Each module of ``targets`` is one table: for every ``[train]`` setting, the argument and
value in that trainer, or what happens instead. ``table`` declares rows and the result,
``translate`` renders any target from its table, ``text`` shows the result.

Rows and values that targets have in common are in ``shared``; the code of a PyTorch
program around a training loop is in ``program``, the optimizer step in ``batch``.
"""
