"""Esper: neural networks that grow themselves while they train."""

__version__ = "0.1.0"
