"""Space of configurations: symbols with candidate values, the order of all configurations, and the errors of the
tuner. In: the user's ``update_space``. Out: configurations as dicts, depth first. Lowest room: imports core only.
"""
