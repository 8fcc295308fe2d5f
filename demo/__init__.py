"""A little story-telling Mixture-of-Experts model: its story grammar, its training and its checkpoint."""
