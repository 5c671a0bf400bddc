"""Knowledge distillation for teachers that are too large to sit beside the student on every GPU."""

__version__ = "0.1.0"
