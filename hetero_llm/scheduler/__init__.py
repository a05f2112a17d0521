"""Inventory and wishes in, plans out. Pure: no Ray, no I/O, no clock of its own."""
