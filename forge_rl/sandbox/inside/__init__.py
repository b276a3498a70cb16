"""What runs in the fork server and in its sessions: imports nothing of this library but what is in this folder."""
