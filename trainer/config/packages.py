"""Optional packages of the trainer. No torch here."""

from importlib.metadata import PackageNotFoundError, version


def has_flash_attention_4() -> bool:
    """Return whether FlashAttention 4 is installed."""
    return flash_attention_4_version() is not None


def flash_attention_4_version() -> str | None:
    """Return the version of the package ``flash-attn-4``; None if not installed.

    Its module ``flash_attn`` is not searched, as other versions have the same name, and
    finding a module in it imports them.
    """
    try:
        return version("flash-attn-4")
    except PackageNotFoundError:
        return None
