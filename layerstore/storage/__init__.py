"""The disk: files, objects, records, locks and the index."""
