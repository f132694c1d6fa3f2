"""Charts as HTML and SVG text: lines, bars, points, a heat map and the timeline of a step, with their axes. In: numbers and
names, which are escaped. Out: a ``figure``. May import the units and tables of this package.
"""
