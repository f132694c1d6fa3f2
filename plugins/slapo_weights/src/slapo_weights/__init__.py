"""Weights in and out: from Hugging Face safetensors into any layout, and out of any layout again."""
