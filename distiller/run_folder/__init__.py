"""A run's `output_dir`: whether a run may use it, the record of the input files, and where its sessions ran."""
