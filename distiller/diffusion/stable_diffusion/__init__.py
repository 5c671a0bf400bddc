"""What is particular to Stable Diffusion pipelines: UNets that predict noise, or v."""
