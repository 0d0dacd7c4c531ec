"""The page of a report: one file of its own, without anything from elsewhere. It knows facts as data, and no store."""
