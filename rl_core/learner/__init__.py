"""The training side: a claim becomes one batch, one step, one record."""
