"""Follow a graph: which tensors are products of Kronecker-sparse weights."""
