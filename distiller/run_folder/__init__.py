"""A run's `output_dir`: whether a run may use it, and the record of the input files."""
