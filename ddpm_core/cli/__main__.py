"""Runs the program for `python -m ddpm_core.cli`, as torchrun starts its workers."""

from ddpm_core.cli import main

if __name__ == "__main__":
    main()
