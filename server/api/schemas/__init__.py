"""Request bodies: raw JSON becomes typed values here, and nowhere else. One file for each family of routes."""
