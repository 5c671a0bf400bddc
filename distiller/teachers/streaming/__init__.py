"""Blocks that visit the device one after the other, through a pool of buffers."""
