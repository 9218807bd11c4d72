"""`ddpm init`: settings that fit the images, this machine and the time."""
