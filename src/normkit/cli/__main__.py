"""``python -m normkit.cli``."""

from normkit.cli import main

main()
