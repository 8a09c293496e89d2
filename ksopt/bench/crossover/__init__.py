"""`ksopt bench crossover`: from which budget on a Kronecker-sparse layer beats a dense one."""
