"""The HTTP front: byte relay for inference routes, FastAPI for everything else."""
