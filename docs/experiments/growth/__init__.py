"""What ksopt costs as models, layers, chains, batches, studies and workers grow."""
