"""What times and judges results: clocks, accuracy, rooflines, energy."""
