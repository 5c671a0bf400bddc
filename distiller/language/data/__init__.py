"""Documents, their tokens, rows of tokens and micro-batches of rows."""
