"""What a run will take before it is started: memory and time of every placement, and the choice between them."""
