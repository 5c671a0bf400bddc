"""Streams blocks from host memory or files through a pool of device buffers."""
