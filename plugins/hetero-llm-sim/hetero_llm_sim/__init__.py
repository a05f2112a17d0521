"""Simulated accelerators: devices from a list, no process groups, and an engine that keeps a profile's time."""
