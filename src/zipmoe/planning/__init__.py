"""Workload model and planner: how the memory of a sparse layer is divided among pools (docs/planning.md).

Pure Python and NumPy; of the native core only the scheduler is used, as the cost of a hit pattern.
"""
