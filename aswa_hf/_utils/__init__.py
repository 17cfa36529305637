"""Utilities that the rest of the package uses; nothing in here is public."""
