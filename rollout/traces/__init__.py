"""Traces: training text as TokenSequence records (see README.md)."""
