"""What every test finds: an interrupt that works."""

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started with `&` by a script: the shell ignores SIGINT then, and so would every program that a test interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
