"""How the bundled miniature was trained."""
