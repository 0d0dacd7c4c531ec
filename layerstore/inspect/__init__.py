"""What is in a store, for people and programs: log, show, ls, diff, stats, report, estimate."""
