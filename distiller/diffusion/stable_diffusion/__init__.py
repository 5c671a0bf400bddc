"""Code specific to Stable Diffusion 1 and 2 pipelines, whose UNets predict noise or v."""
