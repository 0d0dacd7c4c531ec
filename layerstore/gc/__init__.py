"""Retention, mark, sweep and trim: what nobody wants to keep goes."""
