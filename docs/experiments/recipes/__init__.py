"""Training from scratch: dense and Kronecker-sparse, with and without ksopt's recipes."""
