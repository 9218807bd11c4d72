"""The mathematics: the forward process, losses and noise levels of training, and the samplers.

Pure functions of tensors; random numbers are passed in, never drawn. Imports torch and nothing of
the rest of ddpm_core.
"""
