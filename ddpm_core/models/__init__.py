"""The U-Net. Knows torch and nothing of the rest of ddpm_core."""
