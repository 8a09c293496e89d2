"""ksopt: Kronecker-sparse linear layers, made fast."""

__version__ = "0.1.0"
