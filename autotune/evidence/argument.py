"""Values of arguments and settings, as profiles and studies have them."""

Argument = bool | int | float | str
"""Value of an argument, as TOML and JSON have it."""
