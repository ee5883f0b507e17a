"""Basics that every package uses: units, bounded values, statistics, files, and documents with their renderers."""
