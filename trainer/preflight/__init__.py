"""Checks before the first step, whose warnings become events of the run record.

``dataset_checks`` opens the dataset and compares it with the profile, ``rank_checks``
compares the ranks with each other and with the profile, and ``directory_checks`` finds
out whether the run directory can keep the checkpoints. A check raises ``BadConfig`` if
training would fail or be silently wrong, and returns warnings otherwise.

``allotted_cpus`` counts the CPUs of a process; ``start_warning`` and ``ranks_text``
word the warnings. This package exports no names: import each check from its module.
"""
