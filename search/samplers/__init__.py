"""Which chain to measure next."""
