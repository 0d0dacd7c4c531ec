"""The ``.pt`` container: zip archives and inert pickles, read and written without torch. The security boundary."""
