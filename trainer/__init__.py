"""The trainer process: owns the weights and the optimizer, learns from recorded trajectories."""
