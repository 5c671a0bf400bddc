"""A teacher that one rank holds and answers for all."""
