"""Messages and text: templates in, deltas out. No HTTP, no model, no threads."""
