"""The page of a run, for a browser: its data (`run_data`) and its HTML (`document`)."""
