"""Two versions of ksopt run on the same inputs, with the same times played to both."""
