"""Training as an elastic PyTorchJob: what it is made of, its launcher, and who cleans up.

Needs the extra `pipeline`. `ddpm_core` knows nothing of this package: its commands (`ddpm jobs`)
join the program through the entry point group `ddpm.commands`.
"""
