"""Tensors described before they are read: views made of boxes of file tensors, and the parts that a fused parameter
consists of. In: names and shapes in files, torch calls on unread tensors, and ``made_of`` declarations. Out: a
``View`` that reads exactly the bytes it needs. May import ``safetensors_files``.
"""
