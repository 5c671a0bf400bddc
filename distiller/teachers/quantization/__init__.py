"""Teachers whose linear layers hold int8, fp8 or nf4 weights, and how far that moves their outputs."""
