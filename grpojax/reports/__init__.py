"""A run as one page of HTML: pure functions of its rows, and the page."""
