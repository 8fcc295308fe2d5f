"""Measuring this machine for the planner (docs/profiling.md)."""
