"""Task `diffusion`: code that all pipeline families share, and a subpackage for each family."""
