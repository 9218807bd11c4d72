"""Networks from and for other programs."""
