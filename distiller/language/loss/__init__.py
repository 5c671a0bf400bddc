"""Divergences between next-token distributions, and the loss of a chunk of tokens at a time."""
