"""hetero-llm's Ascend backend."""
