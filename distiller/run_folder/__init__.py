"""What a run keeps in its `output_dir` beside checkpoints, and reading it back."""
