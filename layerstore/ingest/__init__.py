"""A checkpoint on disk becomes a commit."""
