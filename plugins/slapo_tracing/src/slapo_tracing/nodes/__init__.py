"""Values, functions and modes that appear in traced graphs, and Python code for graphs.

This sub-package may import no other one.
"""

from ._torch_private import (
    UnknownValueError,
    has_values,
    in_function_transform,
    whole_shape,
    without_fake_tensor_logs,
    without_observers,
)
from .codegen import compile_graph
from .forward_wrapping import forward_wrappers, own_forward, wrap_forward
from .graph_functions import asks_for_gradients, expect, expect_outputs, rebuild, set_state
from .mode_regions import ModeState, autocast_state, current_modes, is_mode_node, leave_modes, write_mode_nodes
from .module_signature import module_signature, plain_attributes
from .nested_values import ATOMS, MODULE_TABLES, Hidden, Snapshot, difference, fingerprint, shallow_copy, tensors_in
from .opaque_modules import as_layer, is_opaque, is_taken_apart
from .symbolic_sizes import SIZE
from .torch_calls import SHAPES, function_name, is_metadata, model_source, name_of

__all__ = [
    "ATOMS",
    "Hidden",
    "MODULE_TABLES",
    "ModeState",
    "SHAPES",
    "SIZE",
    "Snapshot",
    "UnknownValueError",
    "as_layer",
    "asks_for_gradients",
    "autocast_state",
    "compile_graph",
    "current_modes",
    "difference",
    "expect",
    "expect_outputs",
    "fingerprint",
    "forward_wrappers",
    "function_name",
    "has_values",
    "in_function_transform",
    "is_metadata",
    "is_mode_node",
    "is_opaque",
    "is_taken_apart",
    "leave_modes",
    "model_source",
    "module_signature",
    "name_of",
    "own_forward",
    "plain_attributes",
    "without_fake_tensor_logs",
    "rebuild",
    "set_state",
    "shallow_copy",
    "tensors_in",
    "without_observers",
    "whole_shape",
    "wrap_forward",
    "write_mode_nodes",
]
