"""Parts of a model that run as one: compiled, scripted, or under one name."""
