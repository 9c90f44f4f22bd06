"""The inference engines: processes, control calls and update windows (see README.md)."""
