"""Sampling: draw images from checkpoints in shards and store them with a manifest."""
