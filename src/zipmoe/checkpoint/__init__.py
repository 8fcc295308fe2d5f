"""The original checkpoint: what it holds and how its tensors become module parameters, one expert at a time."""
