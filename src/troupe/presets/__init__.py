"""Tuned values per environment, one TOML file each: general ones on top, then a table per algorithm."""
