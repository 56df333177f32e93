"""`python -m interlace` is the command line."""

from interlace.cli import main

main()
