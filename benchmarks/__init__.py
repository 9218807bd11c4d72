"""Benchmarks: speed compared with diffusers as ratios, snapshots, prepare and GPU checks."""

import os

# The setting of the ddpm program, applied to every library: see ddpm_core/cli.py.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
