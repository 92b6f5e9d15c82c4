"""`python -m gewell_workers` is `gewell up`."""

from gewell_workers.cli.up import main

main()
