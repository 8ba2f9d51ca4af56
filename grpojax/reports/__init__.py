"""Reports of runs, each an HTML page: pure functions of rows, and the page."""
