"""Which pairs to label next."""
