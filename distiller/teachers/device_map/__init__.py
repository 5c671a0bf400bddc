"""One teacher spread over a node's GPUs by a device map."""
