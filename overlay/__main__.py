import signal
import sys

from overlay.cli import main

# What a command started (rehearsals, a demo's server) ends with it: an exception lets it clean up, the signal does not.
signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
raise SystemExit(main())
