"""Training from scratch, dense beside Kronecker-sparse, with ksopt's recipes and without."""
