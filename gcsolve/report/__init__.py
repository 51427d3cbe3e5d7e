"""Plans and comparisons as tables, figures and a page. Nothing here decides anything."""
