"""Conversion of GGUF files (llama.cpp's format) into model folders of transformers."""
