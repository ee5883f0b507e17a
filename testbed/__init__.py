"""Corpora, examples of values, simulators and a pretended GPU.

Benchmarks and tests share them, and the product never imports them. ``simulators`` are
machines of known behaviour, ``nullgpu`` lets torch's CUDA build run without a GPU,
``examples`` builds profiles, trials and runs, and ``corpora`` and ``datasets`` write
real data.
"""
