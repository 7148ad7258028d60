"""Functions of a user's in the places that Headway leaves open: what they are, and how they are loaded (docs/hooks.md).
"""
