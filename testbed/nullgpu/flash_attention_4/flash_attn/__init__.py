"""Stand-in for the package of FlashAttention."""
