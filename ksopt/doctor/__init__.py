"""The checks of `ksopt doctor`: facts about this machine, and advice."""
