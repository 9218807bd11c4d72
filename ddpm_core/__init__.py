"""Train a diffusion model on your own images, and run it as a pipeline."""

__version__ = "0.1.0"
