"""The HTTP endpoint that agents call."""
