"""What is particular to Wan transformers."""
