"""The figures that README and docs quote: a text or a table for each key.

A page holds only a key, as in ``<!-- = h100.now.mfu -->31.5 %<!-- end -->`` or
``<!-- table speed.published -->``. Each module here covers one subject: its function
``figures`` takes all recorded figures and returns those of its subject, as text. A new
key is one line in the module of its subject.
"""
