"""Bytes on disk: what a model path means, and later downloads and bundles."""
