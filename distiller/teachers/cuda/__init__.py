"""CUDA driver calls that torch does not offer."""
