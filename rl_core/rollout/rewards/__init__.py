"""Rewards: a text and a ground truth become a Score."""
