"""Data sources; every sample has a stable id, its place in the source."""
