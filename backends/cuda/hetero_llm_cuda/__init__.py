"""hetero-llm's NVIDIA backend."""
