"""The page of a run, for a browser: what it holds (`run_data`), and its HTML (`document`)."""
