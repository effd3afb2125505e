"""Thousands of growing networks as one: hosts of one form, their seeds, their optimizer and their measurements as
tensors [N, …]. The eager engine is the reference (`docs/performance.md`)."""
