"""The unmodified model as Transformers builds it, and the weight conversions of its loading and saving. In: a
scheduled model and its config. Out: names, shapes, ties and conversions of the unmodified model, all computed on
the meta device. May import ``tensor_views`` and ``safetensors_files``; Transformers is imported inside functions.
"""
