"""What is particular to Stable Diffusion 3 pipelines."""
