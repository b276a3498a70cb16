"""One file a method: copy one and edit it."""
