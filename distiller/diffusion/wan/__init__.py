"""Code specific to Wan pipelines."""
