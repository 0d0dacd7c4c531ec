"""The verbs: each reads and decides first, then executes."""
