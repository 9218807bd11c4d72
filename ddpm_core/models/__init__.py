"""The U-Net of Ho et al. (2020), its conditioning, and how it is laid out for a device."""
