"""Self-contained pages of a run: one HTML file each, which asks no host for anything."""
