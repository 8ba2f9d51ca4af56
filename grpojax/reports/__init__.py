"""HTML reports of runs, built by pure functions of the runs' rows."""
