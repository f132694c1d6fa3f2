"""Loading of Hugging Face safetensors into any layout, and export from any layout."""

from .consolidate import consolidate_model
from .export import export_weights
from .load import Weights
from .tensor_views.fused_parameters import made_of

__all__ = ["Weights", "consolidate_model", "export_weights", "made_of"]
