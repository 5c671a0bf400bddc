"""What `accelerate launch` was asked for: its launch file, the checks of it, and the Accelerator that follows."""
