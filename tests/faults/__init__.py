"""Faults, drawn from a seed and done to real training runs on several workers.

`schedule` draws what happens and when, `attempt` starts workers and finds them, `faults` does what
a schedule says, `judge` compares the end with a run that nobody disturbed, `play` is the whole.
From the command line: `python tests/faults --seed 17`.
"""
