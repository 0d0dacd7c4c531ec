"""
Our figures beside those of what people use today, on the same ZeRO-3 state.

Each system saves, loads and survives a flipped bit, or does not; then tools make one checkpoint of others.
"""
