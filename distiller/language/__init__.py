"""What is particular to language models."""
