"""What finds the modules and patterns that kernels serve, by what they compute."""
