"""Which replica answers a request. Pure: no I/O; state and clock come as arguments."""
