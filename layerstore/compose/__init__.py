"""A query becomes a composite, and a composite becomes files."""
