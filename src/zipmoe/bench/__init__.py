"""Our engine and what people run instead, measured in turn under the same memory limit (docs/benchmarking.md)."""
