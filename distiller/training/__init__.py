"""The training loop and its parts: optimizer, guard against non-finite updates, timing, tracking."""
