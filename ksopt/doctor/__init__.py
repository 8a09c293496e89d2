"""What is on this machine, and what to do about it."""
