"""GGUF files (llama.cpp's format) as folders of transformers."""
