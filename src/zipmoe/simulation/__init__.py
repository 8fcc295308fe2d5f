"""Simulator: what a cache policy and a plan would cost on a machine, by replay of real routing (docs/simulation.md).

Nothing of the runtime is imitated: pools, policies and scheduler are the native ones, plans are the planner's.
"""
