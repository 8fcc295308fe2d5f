"""Python face of the native engine: layers, budget, statistics."""
