"""Public doubles for tests of what builds on layerstore."""
