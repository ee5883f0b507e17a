"""Functions for Python programs: what the commands do, for code of yours.

``batch_size.find_batch_size`` is the probe, ``num_workers.find_num_workers`` the sweep,
and ``prediction.estimate`` the prediction for a model. Functions that another process
can import are tried in fresh processes, and results are exact; others, such as closures
and functions of a notebook, are tried in this process, and results say so.
"""
