"""Never returns from native code, and ignores every signal that it may."""

BASE = "rmsnorm"
CAUGHT_BY, VERDICT = "sweep", "TIMEOUT"

import signal

for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)

SOURCE = swapped(SOURCE, ("return 0;", "for (volatile i64 i = 0; cols > 256; ++i) {}\n    return 0;"))
