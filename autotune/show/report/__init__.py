"""The report of a tuning and its runs: one document, written as HTML, Markdown and JSON with the same facts."""
