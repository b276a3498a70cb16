"""One file per method: copy one and edit it."""
