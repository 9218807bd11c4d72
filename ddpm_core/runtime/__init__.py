"""Devices, processes and signals: how a run executes on the machines it has."""
