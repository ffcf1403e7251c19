"""`python -m unskew.cli`."""

from unskew.cli import main

main()
