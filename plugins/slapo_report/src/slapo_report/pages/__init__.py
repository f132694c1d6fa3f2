"""The pages of the planner and of the tuner. In: a plain dict, as JSON has it. Out: the text of an HTML file. Keys that are
missing are left out of the page, unknown ones are ignored. May import all of this package.
"""
