"""The one transaction that makes a record visible, pins, and a commit that many ranks make together."""
