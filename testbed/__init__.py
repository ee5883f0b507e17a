"""What benchmarks and tests share: corpora, examples of values, simulators, a pretended GPU.

The product never imports it. ``simulators`` are machines of known behaviour, ``nullgpu``
lets torch's CUDA build run without a GPU, ``examples`` builds profiles, trials and runs,
and ``corpora`` and ``datasets`` write real data.
"""
