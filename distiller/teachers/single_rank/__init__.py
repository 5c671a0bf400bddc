"""A teacher on one rank, which runs the calls of all ranks."""
