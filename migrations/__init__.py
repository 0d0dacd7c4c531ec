"""One frozen module per step of the store's format; there is none yet."""
