"""Which part of a teacher's next-token distribution a cache stores for each token."""
