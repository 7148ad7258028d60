"""Procedural tasks: prompts with their answers, made from a seed."""
