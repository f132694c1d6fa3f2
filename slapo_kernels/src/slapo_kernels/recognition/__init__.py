"""Recognition of the modules and graph patterns that kernels can replace, by the operations and numbers of their forwards."""
