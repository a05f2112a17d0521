"""What devices are there: probing each kind in a subprocess, overrides, the local node."""
