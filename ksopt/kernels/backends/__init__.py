"""What differs between devices: one file each."""
