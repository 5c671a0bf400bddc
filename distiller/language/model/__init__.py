"""A causal language model of transformers: its structure, its files and tensor names, its logits and vocabulary."""
