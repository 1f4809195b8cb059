"""Models behind a web page and a JSON API."""
