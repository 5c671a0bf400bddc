"""Code specific to Stable Diffusion 3 pipelines."""
