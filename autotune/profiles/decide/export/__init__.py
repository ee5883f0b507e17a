"""Exports of a profile to other trainers. Pure.

Every ``[train]`` setting is translated, or a value tuned for your own code. The result
says which settings mean the same there, which differ, and which are lost.

Begin with ``table``, the values of an export, and ``translate``. ``hf_trainer``,
``accelerate`` and ``lightning`` list the settings of each target; common ones are in
``shared`` (with ``schedule`` and ``ddp``), ``program`` (code of the calling program)
and ``unexpressed``. ``remarks`` has common remarks, ``batch`` the optimizer step.
"""

from autotune.profiles.decide.export.translate import export_own_values, export_profile

__all__ = ["export_own_values", "export_profile"]
