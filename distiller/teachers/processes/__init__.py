"""Processes that hold the teacher and train nothing: how they are started, asked and ended."""
