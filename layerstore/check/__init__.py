"""Verify, repair and doctor."""
