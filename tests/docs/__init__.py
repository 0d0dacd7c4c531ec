"""The documentation: its links, pictures and generated pages, and its code, which runs."""
