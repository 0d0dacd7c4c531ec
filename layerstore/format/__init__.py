"""Bytes to model and back, pure: nothing here opens a file."""
