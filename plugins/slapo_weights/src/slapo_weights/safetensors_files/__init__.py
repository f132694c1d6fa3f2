"""Safetensors files in Hugging Face layout: reading boxes of tensors, writing files at planned offsets, and replacing
a model folder. In: paths, names, boxes and tensors. Out: tensors on the CPU, or files. Lowest room: imports core
only.
"""
