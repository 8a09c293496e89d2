"""Files, locks, processes and limits of the machine, independent of ksopt's computations."""
