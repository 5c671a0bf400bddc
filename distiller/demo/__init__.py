"""Prompts, pictures and the judge of the packaged recipes that draw or classify handwritten digits."""
