"""The mathematics: the process, its noise levels in training, and the samplers that undo it.

Pure functions of tensors; noise is passed in, never drawn. Knows torch and nothing of ours.
"""
