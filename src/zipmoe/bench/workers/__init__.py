"""Programs that load one model with one engine, generate, and write what they measured to standard output."""
