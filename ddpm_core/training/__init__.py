"""Training: the state, its snapshots, and the loop that updates it."""
