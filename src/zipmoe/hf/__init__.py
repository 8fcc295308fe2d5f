"""Transformers plug-in: quantizer, experts functions, packed modules, families outside the experts interface."""
