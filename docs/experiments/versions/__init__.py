"""Runs two versions of ksopt on the same inputs, with the same simulated times."""
