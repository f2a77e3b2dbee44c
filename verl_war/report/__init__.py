"""What happened in a run: a page, a summary and a live view, all from the router's journal."""
