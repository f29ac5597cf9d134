"""``python -m normkit``."""

from normkit.cli import main

main()
