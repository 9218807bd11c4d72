"""`ddpm watch`: a live page of a run."""
