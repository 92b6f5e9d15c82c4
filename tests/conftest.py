"""Settings that all tests share: property tests without deadlines, and the same examples in every CI run."""

import os
import signal

from hypothesis import settings

# A shared machine stalls for seconds; time limits are pytest's. CI repeats the same examples so that a failure is the
# change's, while a contributor's runs go on looking for new ones.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")

# A shell that starts the suite in the background ignores SIGINT for it, and children inherit that: Ctrl-C tests would
# send a signal that nobody gets.
signal.signal(signal.SIGINT, signal.default_int_handler)
