"""Low-rank adapters: what they are by the settings, what cannot work with them, and their tensors (algorithms.md)."""
