"""Networks of the diffusers package: import and export."""
