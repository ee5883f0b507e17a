"""One file per command: parse, call, render."""
