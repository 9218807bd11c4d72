"""Speed beside other people's code, measured in one run and given as ratios."""

import os

# As the ddpm program does, for all contestants: see ddpm_core/cli.py.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
