"""`python -m gewell_workers` is `gewell up`."""

from gewell.threads import wait_passively
from gewell_workers.cli.up import main

wait_passively()
main()
