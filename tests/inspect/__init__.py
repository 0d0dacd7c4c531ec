"""The report: its facts, its page, and the page in a browser."""
