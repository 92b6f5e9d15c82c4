"""`python -m gewell` is the `gewell` command."""

from gewell.cli.main import main

main()
