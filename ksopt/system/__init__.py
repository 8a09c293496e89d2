"""Files, locks, processes and limits of the machine; nothing here knows what ksopt computes."""
