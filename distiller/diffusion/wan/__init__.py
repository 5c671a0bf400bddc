"""What is particular to Wan pipelines."""
