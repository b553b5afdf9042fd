"""Training: the loss, the step, the optimizer and the loop around them."""
