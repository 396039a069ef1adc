"""The `hpc-serve` command's first lines, and `python -m hpc_serve.cli`.

Until the command itself handles Ctrl-C, the signal ends the process at once, without a traceback of imports.
"""

import gc
import signal

_COLLECT_AFTER = 50_000
"""New objects between two looks for garbage. A short command leaves hardly any."""


def start() -> None:
    """Run the command of this process's arguments."""
    gc.set_threshold(_COLLECT_AFTER)
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from hpc_serve.cli.main import main

    signal.signal(signal.SIGINT, handler)
    main()


if __name__ == "__main__":
    start()
