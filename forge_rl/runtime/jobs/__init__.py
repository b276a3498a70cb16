"""Jobs: where a run gets its hosts from, by the flag --job."""
