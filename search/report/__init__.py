"""Reports of a search: the page, tables, plots, JSON and CSV."""
