"""Training: the state, its snapshots, and the loop that moves it."""
