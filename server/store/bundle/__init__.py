"""Bundles: a model, the server and all it needs in one folder, for a machine without a network."""
