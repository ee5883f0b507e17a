"""What runs in child processes. Torch is allowed here, and only here."""
