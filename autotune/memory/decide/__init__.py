"""Pure decisions on memory: no torch, files, clock or environment.

``memory_model`` replays the caching allocator, ``batch_search`` chooses the sizes to
try, and ``sharding`` has the formulas for several GPUs.
"""
