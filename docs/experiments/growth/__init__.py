"""The cost of ksopt as models, layers, chains, batches, studies and workers grow."""
