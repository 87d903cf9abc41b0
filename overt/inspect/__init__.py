"""Load any model, view its attention, check it, evaluate it, and serve it as a web page."""
