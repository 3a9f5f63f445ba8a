"""Training: losses, optimizer and step as pure functions, and the trainer around them."""
