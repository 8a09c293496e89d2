"""What each ATen operator does to the tensors that capture follows."""
