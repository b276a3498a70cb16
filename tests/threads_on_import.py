"""A module that a process must not be forked with: its import starts a thread."""

import threading

threading.Thread(target=threading.Event().wait, daemon=True).start()
