"""The store: durable Arrow shards, put-if-absent claims, admission and staleness (docs/experience-store.md)."""
