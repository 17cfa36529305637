"""Small pieces that the rest of the package stands on; nothing in here is public."""
