"""ZipMoE: Mixture-of-Experts models bigger than memory, without changing a single weight bit."""
