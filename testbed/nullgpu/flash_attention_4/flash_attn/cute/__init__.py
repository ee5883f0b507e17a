"""Stand-in for FlashAttention 4."""
