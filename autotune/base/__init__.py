"""Basics that every other package uses.

It has units and wording of figures (``units``, ``wording``), values with bounds
(``interval``) and their statistics (``estimates``, ``window_statistics``,
``step_statistics``), files and child processes (``files``, ``process``), JSON
(``answer_json`` for programs, ``readable_json`` for people), and documents with their
renderers.

Begin with ``document``, the content of a report or of a command's output. Then read
``render_console``, ``render_markdown`` and ``render_html``, which turn it into text;
``tables`` and ``svg`` render its tables and charts. Needs no GPU and does not import
torch; matplotlib is imported when the first chart is drawn.
"""
