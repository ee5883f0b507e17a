"""Needs of every process that computes on devices: a training's, and a trial's.

The tuner measures with the code that training runs with, so that a trial waits, counts
and fails as training does. It is here, apart from training itself: this package imports
nothing else of the trainer but ``trainer.formats``.

``ranks`` joins the process group and has the collectives that agree on numbers; begin
there. ``device`` picks the GPU of a rank, ``cpu_binding`` keeps the rank on the CPUs
near it, and ``device_events`` marks points in time on it without waiting. ``data_wait``
measures how long a device waits for data. ``out_of_memory`` tells errors that report a
lack of memory from others. ``garbage_collection`` pauses Python's collector while
libraries are imported.

All but ``cpu_binding`` and ``garbage_collection`` need torch, so this package exports
no names; import them from their modules.
"""
