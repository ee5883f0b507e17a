"""Exports of a profile to other trainers. Pure.

Every ``[train]`` setting of a profile is translated, or every value that was tuned for
your own code. An export lists the settings that mean the same in the other trainer,
those that differ, and those that are lost.

Begin with ``table``, the values of an export, and ``translate``. ``hf_trainer``,
``accelerate`` and ``lightning`` list the settings of each target; common ones are in
``shared`` (with ``schedule`` and ``ddp``), ``program`` (code of the calling program)
and ``unexpressed``. ``remarks`` has common remarks, ``batch`` the optimizer step.
``written_arguments`` writes the file of settings and the code.
"""

from autotune.profiles.decide.export.translate import export_own_values, export_profile

__all__ = ["export_own_values", "export_profile"]
