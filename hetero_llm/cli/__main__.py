"""``python -m hetero_llm.cli``: the same as the console script, for processes that start themselves again."""

from hetero_llm.cli import main

main()
