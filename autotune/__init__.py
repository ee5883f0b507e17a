"""Advisor and autotuner for encoder pretraining. This package's process never imports torch."""

__version__ = "0.1.0"
