"""Windows of the bundled trainer, for ``autotune.workers`` and other capabilities."""
