"""The shell: one module per command."""
