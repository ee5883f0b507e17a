"""What all packages stand on: units, bounded values, statistics, files, and documents with their renderers."""
