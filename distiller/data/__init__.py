"""Data sources; every sample has a stable id, its index in the source."""
