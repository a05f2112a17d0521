"""One OpenAI-compatible endpoint for one model on unequal accelerators."""
