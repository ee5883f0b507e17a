"""Pure decisions on memory: no torch, files, clock or environment.

``memory_model`` gives the memory of any micro-batch size from traces of a few, by
``caching_allocator``, which replays torch's, and ``overheads``, which a trace lacks.
``largest_within`` finds the largest size that such a curve allows. ``batch_search``
chooses the sizes to try, and ``sharding`` has the formulas for several GPUs.
``rounding`` has divisions that round up.
"""
