"""A run as somebody looks at it, from its directory alone: nothing here is needed to train."""
