"""Plans and comparisons as tables, figures and a page: they show what a `PlanRecord` or a `Frontier` says."""
