"""A teacher whose tensors are sharded over all ranks."""
