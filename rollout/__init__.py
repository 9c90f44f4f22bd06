"""Rollouts: who runs which attempt, on which engine, and what was sampled (see README.md)."""
