"""Rollouts by servers of SGLang, over HTTP: nothing of SGLang is imported (docs/sglang.md)."""
