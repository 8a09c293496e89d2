"""Which chains there are."""
