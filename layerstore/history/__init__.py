"""Which commits there are: references, lineage and attempts, what a new save follows, staleness."""
