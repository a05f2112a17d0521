"""Local models: facts read from a folder, aliases, the cache, the bundled demo model."""
