"""Functions of yours as a subject: ``build_step`` and ``build_loader``."""
