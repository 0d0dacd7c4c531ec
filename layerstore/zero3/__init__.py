"""DeepSpeed's files: found, read and written without torch."""
