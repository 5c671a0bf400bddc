"""Task `diffusion`: what all families of pipelines share, and a folder for each family."""
