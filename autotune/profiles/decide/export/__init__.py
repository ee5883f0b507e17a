"""Exports of a profile to other trainers. Pure.

Every ``[train]`` setting is translated, or a value found for your own code. The result
says which settings mean the same there, which differ, and which are lost.

Begin with ``table``, the values of an export, and ``translate``. ``shared`` has the
settings that all targets take, ``program`` those that only code of the calling program
takes, ``batch`` the optimizer step; ``hf_trainer``, ``accelerate`` and ``lightning``
have the rest of each target.
"""

from autotune.profiles.decide.export.translate import export_own_values, export_profile

__all__ = ["export_own_values", "export_profile"]
