"""The teacher's outputs on disk: written once by `distiller cache`, then read by loader processes."""
