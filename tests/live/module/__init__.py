"""Tests of attach and resume for a module with its optimizers."""
