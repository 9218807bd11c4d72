"""Faults, drawn from a seed, that hit real training runs on several workers.

`schedule` draws the kind of a fault and its time, `attempt` starts workers and finds their
processes, `faults` applies the fault, `judge` compares the end with an undisturbed run, and `play`
does all of it. On the command line: `python tests/faults --seed 17`.
"""
