"""Training as an elastic job on Kubernetes: the job, its launcher, the cleanup of leftover jobs.

Requires the extra `pipeline`. `ddpm_core` does not import this package: its commands (`ddpm jobs`)
join the program through the entry point group `ddpm.commands`.
"""
