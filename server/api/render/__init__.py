"""Answers: typed values become JSON here, and nowhere else. One file for each family of routes."""
