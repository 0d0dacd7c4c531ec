"""Steps for tests alone: from formats that never were, written as a released step has to be."""
