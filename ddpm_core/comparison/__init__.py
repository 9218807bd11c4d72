"""Compare methods at equal training time, with several seeds: `ddpm compare`.

experiment.py reads the file, cost.py turns the budget into steps, runs.py trains and samples,
scoring.py scores, verdict.py judges the differences, report.py writes results, compare.py combines
them.
"""
