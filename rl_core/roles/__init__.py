"""Models beside the policy: what they are by the settings, and what cannot work with them (docs/algorithms.md)."""
