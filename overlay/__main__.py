from overlay import endings
from overlay.cli import main

with endings.as_exceptions():
    status = main()
raise SystemExit(status)
