"""Data sources: what `prepare.source` may name."""
