"""Weights from the trainer to the engines (see README.md)."""
