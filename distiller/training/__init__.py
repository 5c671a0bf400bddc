"""The training loop and what it steps through: optimizer, guard against non-finite updates, timing, tracking."""
