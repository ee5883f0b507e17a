"""``autotune data stage``."""


def stage() -> None:
    """To be written."""
