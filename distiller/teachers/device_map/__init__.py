"""One copy of the teacher, spread over a node's GPUs by a device map."""
