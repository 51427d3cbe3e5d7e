"""The colours of every picture: Okabe and Ito's, which people with any colour vision tell apart, and greys for what lives
through the whole step."""

from __future__ import annotations

from gcsolve.report.timeline import CATEGORIES

BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"
SKY, YELLOW, PINK, BLACK = "#56B4E9", "#F0E442", "#CC79A7", "#000000"

COLOURS = dict(zip(CATEGORIES, ("#8c8c8c", "#5e5e5e", "#c4c4c4", YELLOW, BLUE, ORANGE, SKY, PINK), strict=True))
"""The colour of each category of memory."""
