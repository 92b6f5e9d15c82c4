"""How the threads of CPU maths wait for each other. No torch: it must be said before torch is imported."""

import os


def wait_passively() -> None:
    """Let OpenMP threads sleep at barriers instead of spinning, unless the environment already says how they wait.

    A worker shares the machine with a server, an output process and clients. When there are more of them than cores, a
    thread that spins at a barrier keeps its partner off the core that it waits for, and each of a step's hundreds of
    barriers costs a slice of the operating system's scheduler: gewell-nano on two busy cores (load 14 to 17) decoded
    less than 1 token/s spinning and 62 sleeping.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
