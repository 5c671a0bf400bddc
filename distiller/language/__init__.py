"""Distillation of causal language models: data, models, losses, teacher network, cache and task."""
