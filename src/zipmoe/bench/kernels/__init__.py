"""Rates of the native kernels, without a model: products with packed weights, and decoding (docs/benchmarking.md)."""
