"""A night: what it was asked for, what it is compared with, what becomes of it (docs/nightly.md)."""
