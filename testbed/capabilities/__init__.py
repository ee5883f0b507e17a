"""Capabilities of autotune for each kind of subject, as one table.

``table`` declares kinds and capabilities: a new capability is one more row. ``checks``
says what an answer must have. Tests run every cell of the table, on a CPU and on
pretended GPUs, and ``docs/your-code.md`` shows it.
"""
