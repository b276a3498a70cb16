"""Code of the fork server and its sessions, which imports no other part of this library."""
